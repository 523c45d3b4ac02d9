# SPDX-License-Identifier: Apache-2.0
"""The demo's arguments. Nothing but Python is needed: `./demo` reads them before it installs
anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Completes Python code with the pair of small models in this repository, on the CPU: with DDTree,
with DFlash's chain and plainly. The three texts must be the same. Each colour is a round, that is
one forward pass of the target."""
HELP_SHOWN = 64
"""Exit status of this module where help was asked for, so that the caller stops, too."""


def find_models() -> Path:
    """The folder of the pair: of this checkout, or below the present folder."""
    models = Path(__file__).resolve().parents[2] / "models"
    return models if models.is_dir() else Path.cwd() / "models"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read and check them. Exits with 2 and one line where something does not fit."""
    models = find_models()
    parser = argparse.ArgumentParser(
        prog="demo",
        description=DESCRIPTION,
        epilog="./serve starts the same pair as an OpenAI server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--target", default=str(models / "nano"), help="model that decides the text"
    )
    parser.add_argument("--drafter", default=str(models / "nano-dflash"), help="DFlash drafter")
    parser.add_argument(
        "--budget", type=int, default=31, help="nodes of a tree (1 to 255), root not counted"
    )
    parser.add_argument("--chain", type=int, default=7, help="tokens of the chain")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens a prompt")
    parser.add_argument(
        "--prompt",
        action="append",
        help="prompt (repeat for several; default: four of Python code)",
    )
    parser.add_argument(
        "--show-tree", type=int, metavar="N", default=1, help="rounds of which the tree is drawn"
    )
    parser.add_argument(
        "--no-color", action="store_true", help="plain text, as in a pipe; NO_COLOR=1 does the same"
    )
    arguments = parser.parse_args(argv)
    for problem in problems(arguments):
        parser.error(problem)
    return arguments


def problems(arguments: argparse.Namespace) -> list[str]:
    """What does not fit, each in one line; the first is enough for a user."""
    found = []
    if not 1 <= arguments.budget <= 255:
        found.append(f"--budget {arguments.budget}: give a whole number from 1 to 255")
    if arguments.max_tokens < 1:
        found.append(f"--max-tokens {arguments.max_tokens}: give a whole number of at least 1")
    if arguments.show_tree < 0:
        found.append(f"--show-tree {arguments.show_tree}: give a whole number of at least 0")
    if "" in (arguments.prompt or ()):
        found.append("--prompt: a prompt is empty")
    configs = {}
    for option in ("target", "drafter"):
        path = Path(getattr(arguments, option)) / "config.json"
        try:
            configs[option] = json.loads(path.read_text())
        except OSError:
            return [*found, f"--{option}: no model in {path.parent}"]
        except ValueError:
            return [*found, f"--{option}: {path} is no JSON"]
    return found + pair_problems(arguments, configs["target"], configs["drafter"])


def is_drafter(config: dict[str, object]) -> bool:
    """Whether a config.json is a DFlash drafter's, in either format."""
    return "dflash_config" in config or config.get("speculators_model_type") == "dflash"


def pair_problems(
    arguments: argparse.Namespace, target: dict[str, object], drafter: dict[str, object]
) -> list[str]:
    """What does not fit of the two models and the chain."""
    if is_drafter(target) and not is_drafter(drafter):
        return [f"--target {arguments.target} is a drafter, --drafter is none: exchange the two"]
    if is_drafter(target):
        return [f"--target {arguments.target} is a drafter: give the model that decides the text"]
    if not is_drafter(drafter):
        return [f"--drafter {arguments.drafter} is no DFlash drafter"]
    block = drafter.get("block_size")
    most = block - 1 if isinstance(block, int) else 31
    if not 1 <= arguments.chain <= most:
        return [
            f"--chain {arguments.chain}: give a whole number from 1 to {most}, the drafter's "
            "block_size - 1"
        ]
    return []


if __name__ == "__main__":
    try:
        parse_arguments(None)
    except SystemExit as stop:
        sys.exit(stop.code or HELP_SHOWN)
