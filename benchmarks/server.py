# SPDX-License-Identifier: Apache-2.0
"""Drives a running OpenAI-compatible vLLM server for benchmarks.serve_load."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.changing import Phase, Timeline
from benchmarks.report import Run, run_record
from benchmarks.traffic import TRAFFIC

COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:iteration_tokens_total_count": "steps",
}


def read_counters(text: str) -> dict[str, int]:
    """Drafts, accepted tokens and engine steps of a /metrics page, summed over engines."""
    values = dict.fromkeys(COUNTERS.values(), 0)
    for line in text.splitlines():
        name = line.split("{")[0].split(" ")[0]
        if name in COUNTERS:
            values[COUNTERS[name]] += int(float(line.rsplit(" ", 1)[1]))
    return values


async def _drive(
    url: str,
    model: str,
    prompts: Sequence[list[int]],
    max_tokens: int,
    concurrency: int,
    name: str,
    sampling: Mapping[str, Any],
    traffic: str,
) -> Run:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def counters() -> dict[str, int]:
            async with session.get("/metrics") as answer:
                return read_counters(await answer.text())

        results: list[tuple[int, float, float]] = []
        todo = iter(prompts)

        async def client() -> None:
            for prompt in todo:  # shared by all clients
                body = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
                body |= {"temperature": 0, "ignore_eos": True, "stream": True, **sampling}
                body |= {"stream_options": {"include_usage": True}}
                sent = time.perf_counter()
                first = last = sent
                tokens = 0
                async with session.post("/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    async for line in answer.content:
                        if not line.startswith(b"data: {"):
                            continue
                        chunk = json.loads(line[6:])
                        if chunk.get("choices"):
                            last = time.perf_counter()
                            first = last if first == sent else first
                        if chunk.get("usage"):
                            tokens = chunk["usage"]["completion_tokens"]
                results.append((tokens, first - sent, last - first))

        before, start = await counters(), time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        seconds = time.perf_counter() - start
        after = await counters()
    change = {key: after[key] - before[key] for key in after}
    return run_record(name, concurrency, seconds, results, **change, traffic=traffic)


def drive_server(
    url: str,
    model: str,
    prompts: Sequence[list[int]],
    max_tokens: int,
    concurrency: int,
    name: str,
    sampling: Mapping[str, Any],
    traffic: str = "",
) -> Run:
    """All prompts, `concurrency` streams at a time, `max_tokens` tokens each; greedy unless
    `sampling` says otherwise."""
    return asyncio.run(
        _drive(url, model, prompts, max_tokens, concurrency, name, sampling, traffic)
    )


async def _drive_phases(
    url: str,
    model: str,
    prompts: Mapping[str, Sequence[list[int]]],
    phases: Sequence[Phase],
    max_tokens: int,
    seed: int,
) -> tuple[Timeline, dict[str, int]]:
    import aiohttp

    timeline, rng = Timeline(phases), random.Random(seed)
    queues = {traffic: itertools.cycle(own) for traffic, own in prompts.items()}
    connector = aiohttp.TCPConnector(limit=0)
    whole = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=whole, connector=connector) as session:

        async def counters() -> dict[str, int]:
            async with session.get("/metrics") as answer:
                return read_counters(await answer.text())

        async def request(traffic: str, tokens: int) -> None:
            body = {"model": model, "prompt": next(queues[traffic]), "max_tokens": tokens}
            body |= {"temperature": 0, "ignore_eos": True, "stream": True}
            body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            body |= TRAFFIC[traffic].sampling if traffic else {}
            seen = 0
            async with session.post("/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        usage = json.loads(line[6:]).get("usage") or {}
                        now = usage.get("completion_tokens", seen)
                        timeline.add(time.perf_counter() - start, now - seen)
                        seen = now

        before, start = await counters(), time.perf_counter()
        flying: set[asyncio.Task[None]] = set()
        while (phase := timeline.phase(time.perf_counter() - start)) is not None:
            while len(flying) < phase.requests:
                length = rng.randint(max(1, max_tokens // 2), max_tokens + max_tokens // 2)
                flying.add(asyncio.create_task(request(phase.traffic, length)))
            # Not longer than a moment: the phase may end before any request does.
            done, flying = await asyncio.wait(
                flying, timeout=0.05, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        for task in flying:
            task.cancel()
        await asyncio.gather(*flying, return_exceptions=True)
        after = await counters()
    return timeline, {key: after[key] - before[key] for key in after}


def drive_phases(
    url: str,
    model: str,
    prompts: Mapping[str, Sequence[list[int]]],
    phases: Sequence[Phase],
    max_tokens: int,
    seed: int,
) -> tuple[Timeline, dict[str, int]]:
    """A changing load on a server: its timeline, and what the server counted meanwhile."""
    return asyncio.run(_drive_phases(url, model, prompts, phases, max_tokens, seed))
