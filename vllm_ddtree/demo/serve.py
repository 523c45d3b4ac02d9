# SPDX-License-Identifier: Apache-2.0
"""The embedded pair as an OpenAI server on the CPU test bed: `./serve`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from vllm_ddtree.demo.arguments import find_models
from vllm_ddtree.demo.serve_arguments import parse_arguments
from vllm_ddtree.testing.processes import stop

NAME = "nano"
WAIT_SECONDS = 600


def command(arguments: argparse.Namespace, more: Sequence[str]) -> list[str]:
    """The server's command line."""
    models = find_models()
    spec = {"method": "ddtree", "model": str(models / "nano-dflash"), "budget": arguments.budget}
    own = ["--speculative-config", json.dumps(spec)] if not arguments.plain else []
    return [
        *(str(Path(sys.executable).parent / "vllm"), "serve", str(models / "nano")),
        *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(arguments.port)),
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", "512"),
        *("--max-num-seqs", "8", *own, *more),
    ]


def environment() -> dict[str, str]:
    """What a server on the test bed needs (cpu/README.md)."""
    import ddtree_testbed

    ddtree_testbed.set_environment()
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    own = {**quiet, **os.environ}
    own["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    return own


def hints(port: int) -> str:
    """How to ask the server."""
    body = json.dumps({"model": NAME, "prompt": "def main(", "max_tokens": 32, "temperature": 0})
    return f"""
The server is ready. In another terminal:

    curl http://127.0.0.1:{port}/v1/completions -H 'Content-Type: application/json' -d '{body}'

From Python (pip install openai):

    from openai import OpenAI

    client = OpenAI(base_url="http://127.0.0.1:{port}/v1", api_key="none")
    answer = client.completions.create(model="{NAME}", prompt="def main(", max_tokens=32)
    print(answer.choices[0].text)

What the trees do: curl -s http://127.0.0.1:{port}/metrics | grep ddtree
Ctrl-C stops the server."""


def is_ready(port: int) -> bool:
    """Whether it answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except (OSError, urllib.error.URLError):
        return False


def run(arguments: argparse.Namespace, more: Sequence[str]) -> int:
    """Serve until Ctrl-C; returns the server's exit status."""
    print("Starting vllm serve on the CPU (about a minute) ...", flush=True)
    # A group of its own: Ctrl-C reaches the server through us, once.
    server = subprocess.Popen(command(arguments, more), env=environment(), start_new_session=True)
    try:
        end = time.monotonic() + WAIT_SECONDS
        while server.poll() is None and not is_ready(arguments.port):
            if time.monotonic() > end:
                print(f"It does not answer after {WAIT_SECONDS} s; stopping it.", file=sys.stderr)
                stop(server)
                return 1
            time.sleep(0.5)
        if server.poll() is None:
            print(hints(arguments.port), flush=True)
        return server.wait()
    except KeyboardInterrupt:
        print("\nStopping the server ...", flush=True)
        stop(server)
        print("Stopped. ./serve starts it again.", flush=True)
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return run(*parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
