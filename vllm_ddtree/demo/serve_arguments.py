# SPDX-License-Identifier: Apache-2.0
"""The arguments of `./serve`. Nothing but Python is needed, as for the demo's."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

from vllm_ddtree.demo.arguments import HELP_SHOWN, find_models

DESCRIPTION = """\
Starts `vllm serve` with the pair of small models in this repository, on the CPU, and prints how to
ask it. Kernels are interpreted, so it is slow: this is for trying the OpenAI endpoints without a
GPU. Further options go to `vllm serve`."""


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Ours, and those of `vllm serve`. Exits with 2 and one line where something does not fit."""
    parser = argparse.ArgumentParser(prog="serve", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8000, help="port (default: 8000)")
    parser.add_argument(
        "--budget", default="auto", help='nodes of a tree, 1 to 255, or "auto" (default)'
    )
    parser.add_argument("--plain", action="store_true", help="without speculation")
    arguments, more = parser.parse_known_args(argv)
    if arguments.budget != "auto":
        if not arguments.budget.isdigit() or not 1 <= int(arguments.budget) <= 255:
            parser.error(f'--budget {arguments.budget}: give a number from 1 to 255, or "auto"')
        arguments.budget = int(arguments.budget)
    if not 1 <= arguments.port <= 65535:
        parser.error(f"--port {arguments.port}: give a number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", arguments.port))
        except OSError:
            parser.error(f"--port {arguments.port}: it is in use; give another one")
    if not (find_models() / "nano").is_dir():
        parser.error(f"no models in {find_models()}: the pair is in the clone, not in the wheel")
    return arguments, more


if __name__ == "__main__":
    try:
        parse_arguments(None)
    except SystemExit as stop:
        sys.exit(stop.code or HELP_SHOWN)
