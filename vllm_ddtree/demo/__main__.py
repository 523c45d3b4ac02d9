# SPDX-License-Identifier: Apache-2.0
"""Completes Python code three times, with DDTree, with the DFlash chain and plainly, and compares
text and rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ddtree.demo.arguments import parse_arguments

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_ddtree.demo.show import Writing

PROMPTS = (
    "def read_file(path):\n    with open(path, 'r') as f:\n",
    "import os\nimport sys\n\nclass Reader:\n    def __init__(self, ",
    'def is_empty(self):\n    """',
    'def get(self, key, default=None):\n    """',
)
INTERRUPTED = "Interrupted. Nothing is lost: the same command starts the demo again."


@dataclass
class Mode:
    """A way of decoding, and what came of it."""

    name: str
    spec: dict[str, Any] | None
    token_ids: list[list[int]] = field(default_factory=list)
    writings: list[Writing] = field(default_factory=list)


def modes_of(arguments: argparse.Namespace) -> list[Mode]:
    """The tree first: its text is shown while it is written."""
    drafter = arguments.drafter
    chain = {"method": "dflash", "model": drafter, "num_speculative_tokens": arguments.chain}
    tree = {"method": "ddtree", "model": drafter, "budget": arguments.budget}
    return [
        Mode(f"DDTree, budget {arguments.budget}", tree),
        Mode(f"DFlash chain of {arguments.chain}", chain),
        Mode("plain decoding", None),
    ]


def engine_options(num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Of `vllm.LLM`."""
    from vllm_ddtree.testing import testbed

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


def complete(mode: Mode, arguments: argparse.Namespace, console: Console) -> None:
    """One engine, greedy, all prompts at once."""
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from vllm import SamplingParams

    from vllm_ddtree.demo import show
    from vllm_ddtree.testing.engine import run_engine

    prompts = arguments.prompt or list(PROMPTS)
    mode.writings = [show.Writing(prompt) for prompt in prompts]
    plain, as_written = show.is_plain(console), mode.spec is not None and "budget" in mode.spec
    columns = (TextColumn("{task.description:26}"), BarColumn(24), MofNCompleteColumn())
    progress = Progress(*columns, TextColumn("tokens"), console=console, auto_refresh=False)
    task = progress.add_task(mode.name, total=len(prompts) * arguments.max_tokens)

    def drawn() -> Any:
        from rich.console import Group

        return Group(show.texts(mode.writings, False), progress) if as_written else progress

    live = Live(drawn(), console=console, auto_refresh=False, vertical_overflow="visible")

    def on_output(output: Any) -> None:
        sample = output.outputs[0]
        mode.writings[int(output.request_id)].take(sample.text, len(sample.token_ids))
        progress.update(task, completed=sum(sum(each.counts) for each in mode.writings))
        if not plain:
            live.update(drawn(), refresh=True)

    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, ignore_eos=True)
    options = engine_options(len(prompts), arguments.max_tokens)
    if plain:
        console.print(f"{mode.name} ...")
        result = run_engine(
            arguments.target, mode.spec, prompts, params, on_output=on_output, **options
        )
        if as_written:
            console.print(show.texts(mode.writings, True))
    else:
        with live:
            result = run_engine(
                arguments.target, mode.spec, prompts, params, on_output=on_output, **options
            )
    mode.token_ids = result.token_ids


def show_trees(path: Path, arguments: argparse.Namespace, console: Console) -> None:
    """The rounds in which the tree gained most."""
    from transformers import AutoTokenizer

    from vllm_ddtree.demo import show
    from vllm_ddtree.trace.read import read_trace

    tokenizer = AutoTokenizer.from_pretrained(arguments.target)

    def word(token: int) -> str:
        return show.visible(tokenizer.decode([token]))

    requests = read_trace(path).requests
    for request, number in show.telling_rounds(requests, arguments.show_tree):
        console.print(f"Round {number} of request {request.name}:", style="bold")
        taken = request.chain_taken(number)
        console.print(show.draw_tree(request.rounds[number], word, taken))


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns 0 if the three ways gave the same tokens, else 1."""
    from vllm_ddtree.demo import show
    from vllm_ddtree.testing import testbed

    if bed := testbed():
        console.print("Loading vLLM (CPU test bed) ...")
        bed.prepare()
    modes = modes_of(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rounds = Path(folder) / "rounds.jsonl"
        os.environ["VLLM_DDTREE_ROUNDS"] = str(rounds)
        for mode in modes:
            complete(mode, arguments, console)
        console.print()
        if arguments.show_tree:
            show_trees(rounds, arguments, console)
    console.print(show.table([(mode.name, mode.writings) for mode in modes]))
    console.print("A round is one forward pass of the target. The interpreted kernels of the test")
    console.print("bed are slow, so no speeds are shown: a GPU's rounds are the same.")
    differing = [mode.name for mode in modes if mode.token_ids != modes[-1].token_ids]
    if differing:
        print(f"\nFAILED: not the text of plain decoding: {', '.join(differing)}", file=sys.stderr)
        return 1
    console.print("\nAll three gave the same text, token for token.")
    return 0


def interruptible(action: Callable[[], int], words: str) -> int:
    """Run it; Ctrl-C ends the process with one line."""
    try:
        return action()
    except KeyboardInterrupt:
        sys.stdout.flush()
        print(f"\n{words}", file=sys.stderr, flush=True)
        os._exit(130)  # what vLLM and torch say while they are torn down helps nobody


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if the three runs gave the same tokens, else 1."""
    arguments = parse_arguments(argv)
    for name in ("VLLM_LOGGING_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        os.environ.setdefault(name, "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def action() -> int:
        from vllm_ddtree.demo.show import make_console

        return run(arguments, make_console(arguments.no_color))

    return interruptible(action, INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
