# SPDX-License-Identifier: Apache-2.0
"""Completes Python code three times, plainly, with the DFlash chain and with DDTree, and compares
text and rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ddtree.testing import testbed
from vllm_ddtree.testing.engine import Result, run_engine

PROMPTS = (
    "def read_file(path):\n    with open(path, 'r') as f:\n",
    "import os\nimport sys\n\nclass Reader:\n    def __init__(self, ",
    'def is_empty(self):\n    """',
    'def get(self, key, default=None):\n    """',
)


@dataclass(frozen=True)
class Mode:
    name: str
    spec: dict[str, Any] | None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    models = Path(__file__).resolve().parents[2] / "models"
    if not models.is_dir():  # installed, not a checkout
        models = Path.cwd() / "models"
    parser = argparse.ArgumentParser(
        prog="demo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--target", default=str(models / "nano"), help="model that decides the text"
    )
    parser.add_argument("--drafter", default=str(models / "nano-dflash"), help="DFlash drafter")
    parser.add_argument(
        "--budget", type=int, default=31, help="tree nodes a round (1 to 255), root not counted"
    )
    parser.add_argument("--chain", type=int, default=7, help="draft tokens a round of the chain")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens a prompt")
    parser.add_argument(
        "--prompt",
        action="append",
        help="prompt (repeat for several; default: four of Python code)",
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.budget <= 255:
        parser.error(f"--budget: {arguments.budget} is not between 1 and 255")
    for option in ("chain", "max_tokens"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option.replace('_', '-')}: {getattr(arguments, option)} is below 1")
    if "" in (arguments.prompt or ()):
        parser.error("--prompt: a prompt is empty")
    for option in ("target", "drafter"):
        if not (Path(getattr(arguments, option)) / "config.json").is_file():
            parser.error(f"--{option}: no model in {getattr(arguments, option)}")
    return arguments


def generate_all(modes: Sequence[Mode], arguments: argparse.Namespace) -> list[Result]:
    """One engine after another, greedy, all prompts at once, under one progress bar."""
    from tqdm import tqdm
    from vllm import SamplingParams

    prompts = arguments.prompt or list(PROMPTS)
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, ignore_eos=True)
    results = []
    total = len(modes) * len(prompts) * arguments.max_tokens
    interval = 0.2 if sys.stderr.isatty() else 5.0
    with tqdm(total=total, unit="token", dynamic_ncols=True, mininterval=interval) as bar:
        for mode in modes:
            bar.set_description(mode.name)
            results.append(
                run_engine(
                    arguments.target,
                    mode.spec,
                    prompts,
                    params,
                    on_tokens=bar.update,
                    **engine_options(len(prompts), arguments.max_tokens),
                )
            )
    return results


def engine_options(num_prompts: int, max_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_model_len": 512 + max_tokens,
        "max_num_seqs": max(4, num_prompts),
        "seed": 0,
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
    }
    if testbed() is not None:
        # float32: the three runs then agree to the last token, near-ties included.
        options |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    return options


def print_texts(prompts: Sequence[str], result: Result) -> None:
    dim, reset = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    for number, (prompt, text) in enumerate(zip(prompts, result.texts, strict=True), 1):
        print(f"\n--- text {number} (prompt, then | and the completion)")
        print(f"{dim}{prompt}{reset}|{text}")


def print_table(modes: Sequence[Mode], results: Sequence[Result]) -> None:
    """A round is one verified draft of one request (plain decoding: one token)."""
    print(f"\n{'':24}{'rounds':>8}{'tokens/round':>14}{'tokens/s':>10}")
    for mode, result in zip(modes, results, strict=True):
        tokens = sum(map(len, result.token_ids))
        decoded = tokens - len(result.token_ids)  # the first token comes with the prompt's own pass
        rounds = result.counters.num_drafts or decoded
        length = result.counters.acceptance_length
        print(f"{mode.name:24}{rounds:8}{length:14.2f}{tokens / result.seconds:10.1f}")
    print("tokens/round: the acceptance length, accepted tokens + 1.")
    print("tokens/s: for information; with interpreted kernels it says nothing about a GPU.")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if the three runs gave the same tokens, else 1."""
    arguments = parse_arguments(argv)
    for name in ("VLLM_LOGGING_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        os.environ.setdefault(name, "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if bed := testbed():
        print("Loading vLLM (CPU test bed) ...", flush=True)
        bed.prepare()
    modes = [
        Mode("plain decoding", None),
        Mode(
            f"DFlash chain of {arguments.chain}",
            {
                "method": "dflash",
                "model": arguments.drafter,
                "num_speculative_tokens": arguments.chain,
            },
        ),
        Mode(
            f"DDTree, budget {arguments.budget}",
            {"method": "ddtree", "model": arguments.drafter, "budget": arguments.budget},
        ),
    ]
    results = generate_all(modes, arguments)
    print_texts(arguments.prompt or PROMPTS, results[0])
    print_table(modes, results)
    differing = [
        mode.name
        for mode, result in zip(modes, results, strict=True)
        if result.token_ids != results[0].token_ids
    ]
    if differing:
        print(f"\nFAILED: not the text of plain decoding: {', '.join(differing)}", file=sys.stderr)
        return 1
    print("\nAll three gave the same text, token for token.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
