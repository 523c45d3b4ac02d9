# SPDX-License-Identifier: Apache-2.0
"""Prompts of a load benchmark.

They are windows of Python files that no pair was trained on, a file of the user's, or a data set of
`vllm bench`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def python_prompts(tokenizer: Any, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """`count` different prompts of `tokens` token ids from the installed vLLM's own source.

    Raises ValueError if it is too small for that.
    """
    import vllm

    rng = random.Random(seed)
    files = sorted(Path(vllm.__path__[0]).rglob("*.py"))
    rng.shuffle(files)
    prompts: list[list[int]] = []
    for file in files:
        ids = tokenizer.encode(file.read_text(errors="replace"))
        # Behind the licence and the imports, two lengths apart, so that a continuation is not
        # the next prompt; at most four of a file.
        starts = list(range(max(tokens, len(ids) // 4), len(ids) - 2 * tokens, 3 * tokens))
        prompts += [ids[i : i + tokens] for i in rng.sample(starts, min(4, len(starts)))]
        if len(prompts) >= count:
            return prompts[:count]
    raise ValueError(f"only {len(prompts)} prompts of {tokens} tokens, not {count}")


def file_prompts(tokenizer: Any, count: int, file: Path) -> list[list[int]]:
    """The first `count` prompts of a JSON Lines file: {"prompt": text}, or {"prompt": token ids}.

    Raises ValueError if there are fewer.
    """
    prompts: list[list[int]] = []
    with file.open() as lines:
        for line in lines:
            if len(prompts) < count and line.strip():
                prompt = json.loads(line)["prompt"]
                prompts.append(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    if len(prompts) < count:
        raise ValueError(f"{file} has {len(prompts)} prompts, {count} are needed")
    return prompts


def dataset_prompts(tokenizer: Any, count: int, options: dict[str, Any]) -> list[list[int]]:
    """`count` prompts of a data set of `vllm bench`; its options by name, without dashes in front.

    Raises ValueError if it gives fewer.
    """
    from vllm.benchmarks.datasets import add_dataset_parser, get_samples
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_dataset_parser(parser)
    flags = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    given = [flag if value is True else f"{flag}={value}" for flag, value in flags.items()]
    samples = get_samples(parser.parse_args([*given, f"--num-prompts={count}"]), tokenizer)
    prompts: list[list[int]] = []
    for sample in samples[:count]:
        ids = tokenizer.encode(sample.prompt) if isinstance(sample.prompt, str) else sample.prompt
        prompts.append([int(token) for token in ids])
    if len(prompts) < count:
        raise ValueError(f"the data set gives {len(prompts)} prompts, {count} are needed")
    return prompts
