# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` in processes of its own, with the installed plugin."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import NANO
from vllm_ddtree.testing import cpu

READY_SECONDS = 240
LENGTH = 16


class Server:
    """A running server: JSON requests to its endpoints."""

    def __init__(self, port: int, log: Path) -> None:
        self.base, self.log = f"http://127.0.0.1:{port}", log

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.base + path, timeout=10) as reply:
            return reply.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> str:
        data = json.dumps({"model": "nano", "max_tokens": LENGTH, "ignore_eos": True, **body})
        request = urllib.request.Request(
            self.base + path, data.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.read().decode()

    def whole(self, path: str, **body: Any) -> dict[str, Any]:
        return json.loads(self.post(path, body))

    def streamed(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer."""
        lines = self.post(path, {"stream": True, **body}).splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]


@contextmanager
def serving(folder: Path, model: Path, more: str = "") -> Iterator[Server]:
    """A server of `model` with nano's drafter and `more` lines of YAML; files go to `folder`."""
    cpu.set_environment()
    config, log = folder / "serve.yaml", folder / "server.log"
    config.write_text(
        f"model: {model}\n"
        "served-model-name: nano\n"
        "dtype: float32\n"
        "enforce-eager: true\n"
        "max-model-len: 256\n"
        "max-num-seqs: 4\n"
        "max-num-batched-tokens: 512\n"
        "kv-cache-memory-bytes: 67108864\n"
        "speculative-config:\n"
        "  method: ddtree\n"
        f"  model: {NANO.drafter}\n"
        "  budget: 12\n" + more
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    command += ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder
        )
    try:
        server = Server(port, log)
        end = time.monotonic() + READY_SECONDS
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            try:
                server.get("/health")
                break
            except OSError:
                time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
