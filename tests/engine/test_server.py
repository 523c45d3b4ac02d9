# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the installed plugin: the OpenAI-compatible endpoints, streaming and not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NANO
from tests.engine.harness import PROMPTS, Result, greedy, run_engine
from vllm_ddtree.testing import cpu

READY_SECONDS = 240
LENGTH = 16
SEEDED = {"temperature": 0.8, "seed": 6}


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cpu.set_environment()
    folder = tmp_path_factory.mktemp("server")
    config, log = folder / "serve.yaml", folder / "server.log"
    config.write_text(
        f"model: {NANO.target}\n"
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
        "  budget: 12\n"
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


@pytest.fixture(scope="module")
def plain() -> Result:
    """The prompts of this file offline and without speculation, the first one also sampled."""
    params = [greedy(LENGTH), greedy(LENGTH, **SEEDED), greedy(LENGTH)]
    return run_engine(NANO.target, None, [PROMPTS[0], PROMPTS[0], PROMPTS[3]], params)


def test_the_start_up_line(server: Server) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "method=ddtree" in line]
    assert len(lines) == 1
    for part in ("budget=12", "depth=7", "top_k=12", "block_size=8", str(NANO.drafter)):
        assert part in lines[0]


def test_completions(server: Server, plain: Result) -> None:
    path = "/v1/completions"
    for body, text in (
        ({"prompt": PROMPTS[0], "temperature": 0}, plain.texts[0]),
        ({"prompt": PROMPTS[0], **SEEDED}, plain.texts[1]),
    ):
        answer = server.whole(path, **body)
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == LENGTH
        events = server.streamed(path, **body)
        assert "".join(e["choices"][0]["text"] for e in events) == text
        # An event carries a whole round, so there are fewer than tokens.
        assert 1 < len(events) < LENGTH
        assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_chat(server: Server, plain: Result) -> None:
    # Nano's template is the message itself.
    path, messages = "/v1/chat/completions", [{"role": "user", "content": PROMPTS[3]}]
    answer = server.whole(path, messages=messages, temperature=0)
    assert answer["choices"][0]["message"]["content"] == plain.texts[2]
    events = server.streamed(path, messages=messages, temperature=0)
    deltas = [e["choices"][0]["delta"].get("content") or "" for e in events]
    assert "".join(deltas) == plain.texts[2]


def test_requests_at_once(server: Server, plain: Result) -> None:
    """More than there are slots, streamed and not, greedy and seeded."""

    def ask(i: int) -> str:
        body = {"prompt": PROMPTS[0], **({"temperature": 0} if i % 2 == 0 else SEEDED)}
        if i < 3:
            return server.whole("/v1/completions", **body)["choices"][0]["text"]
        events = server.streamed("/v1/completions", **body)
        return "".join(e["choices"][0]["text"] for e in events)

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(ask, range(6)))
    assert texts == [plain.texts[i % 2] for i in range(6)]


def test_a_bad_request_is_the_clients_and_the_server_lives(server: Server, plain: Result) -> None:
    for bad in ({"min_p": 0.05}, {"logit_bias": {"5": 1.0}}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.whole("/v1/completions", prompt="x", temperature=0.5, **bad)
        assert caught.value.code == 400
        text = caught.value.read().decode()
        assert "min_p and logit_bias sampling parameters are not yet supported" in text
    harmless = {"min_p": 0, "logit_bias": {}, "prompt": PROMPTS[0], "temperature": 0}
    assert server.whole("/v1/completions", **harmless)["choices"][0]["text"] == plain.texts[0]


def test_metrics(server: Server) -> None:
    server.whole("/v1/completions", prompt=PROMPTS[0], temperature=0)
    values: dict[str, float] = {}
    positions: list[float] = []
    for line in server.get("/metrics").splitlines():
        if line.startswith("vllm:spec_decode_") and "_created" not in line:
            name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
            if "per_pos" in name:
                positions.append(value)
            else:
                values[name.removeprefix("vllm:spec_decode_").removesuffix("_total")] = value
    assert values["num_draft_tokens"] == 12 * values["num_drafts"] > 0
    assert len(positions) == 12 and not any(positions[7:])
    assert positions == sorted(positions, reverse=True)
    assert sum(positions) == values["num_accepted_tokens"] > 0
