# SPDX-License-Identifier: Apache-2.0
"""Servers that a benchmark starts, one at a time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_ddtree.cli.bench.client import VLLM, Server, find_server, last_words
from vllm_ddtree.cli.errors import CommandError
from vllm_ddtree.demo.serve import environment as test_bed_environment
from vllm_ddtree.demo.serve import is_ready
from vllm_ddtree.testing import testbed
from vllm_ddtree.testing.processes import stop


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def arguments(
    target: str, spec: dict[str, Any] | None, port: int, options: Sequence[str]
) -> list[str]:
    """Of `vllm serve`."""
    own = ["serve", target, "--host", "127.0.0.1", "--port", str(port), *options]
    return own if spec is None else [*own, "--speculative-config", json.dumps(spec)]


@contextmanager
def serving(
    name: str,
    target: str,
    spec: dict[str, Any] | None,
    options: Sequence[str],
    log: Path,
    wait_seconds: float,
) -> Iterator[Server]:
    """A server of a method; stopped on leaving.

    Raises:
        CommandError: it does not start; the message has its last words.

    """
    port = free_port()
    environment = test_bed_environment() if testbed() is not None else dict(os.environ)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*VLLM, *arguments(target, spec, port, options)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + wait_seconds
        while not is_ready(port):
            if process.poll() is not None:
                raise CommandError(f"{name} does not start: {last_words(log)} (log: {log})")
            if time.monotonic() > end:
                raise CommandError(
                    f"{name} does not answer after {wait_seconds:.0f} s (log: {log})"
                )
            time.sleep(0.5)
        yield find_server(name, f"http://127.0.0.1:{port}")
    finally:
        stop(process)
