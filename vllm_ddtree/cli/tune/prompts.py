# SPDX-License-Identifier: Apache-2.0
"""The user's own prompts: a text file, a JSON Lines file, or a data set of `vllm bench`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ddtree.cli.errors import WrongUsage
from vllm_ddtree.cli.options import vllm_parser


def read_prompts(path: Path, tokenizer: Any = None) -> list[Any]:
    """Prompts of a file, as `vllm.LLM` takes them.

    Args:
        path: with the ending .jsonl: objects with "prompt" (text or token ids) or "messages" (a
            chat), one a line. Else: a prompt a line.
        tokenizer: makes text of chats; a function without arguments that gives it.

    Raises:
        WrongUsage: it is no such file.

    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUsage(f"--prompts {path}: {error}") from error
    if not lines:
        raise WrongUsage(f"--prompts {path}: it is empty")
    if path.suffix != ".jsonl":
        return lines
    return [_prompt(path, number, line, tokenizer) for number, line in enumerate(lines, 1)]


def _prompt(path: Path, number: int, line: str, tokenizer: Any) -> Any:
    try:
        entry = json.loads(line)
        if "messages" in entry:
            return tokenizer().apply_chat_template(
                entry["messages"], tokenize=False, add_generation_prompt=True
            )
        return entry["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise WrongUsage(
            f'--prompts {path}: line {number} has neither "prompt" nor "messages" ({error})'
        ) from error


def dataset_prompts(options: Sequence[str], tokenizer: Any) -> tuple[list[Any], list[str]]:
    """Prompts of a data set, by the options that `vllm bench serve` has for them.

    Args:
        options: `--dataset-name` among them; those of others are left over.
        tokenizer: a function without arguments that gives it.

    Returns:
        The prompts, and the options that are none of a data set.

    """
    from vllm.benchmarks.datasets.datasets import add_dataset_parser, get_samples

    parser = vllm_parser("vllm bench serve", of="tune", allow_abbrev=False)
    add_dataset_parser(parser)
    # What the command's own parser adds, and data sets read.
    parser.set_defaults(backend="openai", endpoint="/v1/completions", tokenizer=None)
    parser.set_defaults(**dict.fromkeys(("input_len", "output_len", "lora_modules")))
    arguments, others = parser.parse_known_args(list(options))
    try:
        samples = get_samples(arguments, tokenizer())
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        raise WrongUsage(f"--dataset-name {arguments.dataset_name}: {error}") from error
    return [sample.prompt for sample in samples], others
