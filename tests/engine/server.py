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

import ddtree_testbed
from tests.conftest import NANO

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

    def metrics(self) -> tuple[dict[str, list[float]], dict[tuple[str, ...], float]]:
        """Values by metric and rounds by (form, reason): ours, which agree with vLLM's."""
        values: dict[str, list[float]] = {}
        forms: dict[tuple[str, ...], float] = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith(("vllm:spec_decode_", "vllm:ddtree_")) and "_created" not in line:
                name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
                name = name.removeprefix("vllm:").removesuffix("_total")
                values.setdefault(name, []).append(value)
                if name == "ddtree_rounds":
                    labels = (line.split(f'{key}="')[1].split('"')[0] for key in ("form", "reason"))
                    forms[tuple(labels)] = value
        (drafts,) = values["spec_decode_num_drafts"]
        (accepted,) = values["spec_decode_num_accepted_tokens"]
        refused = forms["none", "drafts refused"]
        assert sum(n for (form, _), n in forms.items() if form != "none") + refused == drafts
        assert values["ddtree_nodes_drafted"] == values["spec_decode_num_draft_tokens"]
        positions = values["spec_decode_num_accepted_tokens_per_pos"]
        assert positions == sorted(positions, reverse=True)
        assert values["ddtree_accepted_per_depth"] == positions
        assert sum(positions) == sum(values["ddtree_accepted_per_rank"]) == accepted > 0
        return values, forms


@contextmanager
def serving(folder: Path, model: Path, more: str = "", budget: int = 12) -> Iterator[Server]:
    """A server of `model` with nano's drafter and `more` lines of YAML; files go to `folder`."""
    ddtree_testbed.set_environment()
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
        f"  budget: {budget}\n" + more
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
