# SPDX-License-Identifier: Apache-2.0
"""A changing load: its clock is simulated, its engine counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import changing, report
from benchmarks.changing import Phase, Timeline, drive_phases, parse_phase
from benchmarks.traffic import MIXED, TRAFFIC, traffic_prompts


def test_phases_by_name() -> None:
    assert parse_phase("2.5:32:code") == Phase(2.5, 32, "code") and str(parse_phase("3:1")) == "3:1"
    for text in ("2", "0:3", "1:0:code", "1:2:code:more", "x:1"):
        with pytest.raises(ValueError):
            parse_phase(text)


def test_a_timeline_ends_and_bins() -> None:
    timeline = Timeline([Phase(1.5, 2), Phase(1.5, 4)])
    assert [timeline.phase(at) for at in (0.0, 1.5, 2.99, 3.0)] == [
        Phase(1.5, 2),
        Phase(1.5, 4),
        Phase(1.5, 4),
        None,
    ]
    for at, tokens in ((0.0, 1), (1.2, 2), (1.7, 4), (2.9, 8), (3.0, 16)):
        timeline.add(at, tokens)
    assert timeline.by_second == [1, 6, 8] and timeline.by_phase == [3, 12]
    assert timeline.changes() == [1] and timeline.seconds == 3.0


class Engine:
    """Every request gets a token a step and ends after three; a step takes 0.1 s."""

    def __init__(self) -> None:
        self.now, self.left = 100.0, dict[str, int]()
        self.in_flight: list[tuple[float, int]] = []
        self.submitted: list[str] = []

    def submit(self, traffic: str) -> str:
        self.submitted.append(traffic)
        name = f"{len(self.submitted)}"
        self.left[name] = 3
        return name

    def step(self) -> list[Any]:
        self.in_flight.append((self.now - 100, len(self.left)))
        self.now += 0.1
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            outputs.append(SimpleNamespace(request_id=name, finished=self.left[name] == 0))
            if not self.left[name]:
                del self.left[name]
        return outputs

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.left[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)


def test_a_phase_keeps_its_requests_in_flight() -> None:
    engine = Engine()
    timeline = Timeline([Phase(1.0, 2, "easy"), Phase(1.0, 5, "hard"), Phase(1.0, 1, "easy")])
    drive_phases(engine, timeline, engine.submit, lambda: engine.now, lambda output: 1)
    flying = {round(at, 1): n for at, n in engine.in_flight}
    assert flying[0.0] == flying[0.9] == 2 and flying[1.1] == flying[1.8] == 5
    assert flying[2.9] == 1  # the others have ended, nobody cut them
    assert sum(timeline.by_second) == sum(timeline.by_phase) > 0
    assert engine.submitted[0] == "easy" and "hard" in engine.submitted and not engine.left


def test_the_oracle_takes_the_best_static_engine_of_each_second() -> None:
    records = [
        {"engine": engine, "repeat": repeat, "phases": ["2:1", "2:8"], "by_second": row}
        for engine, repeat, row in (
            ("plain", 0, [10, 10, 90, 90]),
            ("chain-7", 0, [40, 40, 50, 50]),
            ("tree-auto", 0, [40, 40, 45, 90]),
            ("tree-auto", 1, [38, 40, 45, 90]),
            ("tree-auto", 2, [90, 40, 0, 90]),
        )
    ]
    seconds = changing.median_seconds(records)
    assert seconds["tree-auto"] == [40, 40, 45, 90]
    assert changing.oracle_seconds(seconds, report.is_static) == [40, 40, 90, 90]
    table = changing.markdown(records, report.is_static)
    assert "| tree-auto | 40 (1.00) | 68 (0.75) | 54 (0.83) |" in table
    assert "by second: 0.00 0.00 0.50 0.00" in table and "left after 1 s" in table


def test_half_of_the_regret() -> None:
    # Half of what the change cost is gone after two seconds; what stays is not the change's.
    assert changing.seconds_to_half([0.0, 0.6, 0.5, 0.2, 0.1, 0.1, 0.1], [1]) == [2]
    assert changing.seconds_to_half([0.1, 0.1, 0.1], [1]) == [0]


def test_prompts_of_every_traffic() -> None:
    class Tokenizer:
        vocab_size = 300

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    for name in TRAFFIC:
        prompts = traffic_prompts(Tokenizer(), name, 9, 40, seed=1)
        assert [len(prompt) for prompt in prompts] == [40] * 9
        assert prompts == traffic_prompts(Tokenizer(), name, 9, 40, seed=1)
        assert prompts != traffic_prompts(Tokenizer(), name, 9, 40, seed=2)
    mixed = traffic_prompts(Tokenizer(), "mixed", 8, 40)
    for place, kind in enumerate(MIXED):
        assert mixed[place::4] == traffic_prompts(Tokenizer(), kind, 2, 40)


def test_a_server_under_changing_load() -> None:
    """Streams as a vLLM server sends them: several tokens a chunk, the usage with each."""
    import asyncio
    import json
    import threading

    from aiohttp import web

    from benchmarks import server

    flying, most, bodies = [0], [0], list[dict[str, Any]]()

    async def completions(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        answer = web.StreamResponse()
        await answer.prepare(request)
        flying[0] += 1
        most[0] = max(most[0], flying[0])
        try:
            for tokens in (3, 5):
                await asyncio.sleep(0.02)
                chunk = {"choices": [{"text": ""}], "usage": {"completion_tokens": tokens}}
                await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await answer.write(b"data: [DONE]\n\n")
        finally:
            flying[0] -= 1
        return answer

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=f"vllm:spec_decode_num_drafts_total {len(bodies)}\n")

    ready, port = threading.Event(), [0]
    loop = asyncio.new_event_loop()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        app = web.Application()
        app.add_routes([web.post("/v1/completions", completions), web.get("/metrics", metrics)])
        runner = web.AppRunner(app)
        loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        loop.run_until_complete(site.start())
        port[0] = runner.addresses[0][1]
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(30)
        phases = [Phase(0.4, 2, "easy"), Phase(0.4, 6, "hard")]
        prompts = {"easy": [[1, 2]], "hard": [[3, 4]]}
        timeline, counts = server.drive_phases(
            f"http://127.0.0.1:{port[0]}", "m", prompts, phases, 8, seed=1
        )
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
    assert most[0] == 6
    assert counts["drafts"] == len(bodies) > 8
    assert sum(timeline.by_phase) == sum(timeline.by_second) > 0
    assert min(timeline.by_phase) > 0
    # Most requests ended, and gave five tokens each; those in flight at the end were cut.
    assert 5 * (len(bodies) - 6) <= sum(timeline.by_phase) <= 5 * len(bodies)
    assert {body["prompt"][0]: body["temperature"] for body in bodies} == {1: 0, 3: 1.0}
    assert all(4 <= body["max_tokens"] <= 12 for body in bodies)
