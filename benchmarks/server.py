# SPDX-License-Identifier: Apache-2.0
"""Drives a running OpenAI-compatible vLLM server for benchmarks.serve_load."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

from benchmarks.report import Run, run_record

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
    url: str, model: str, prompts: Sequence[list[int]], max_tokens: int, concurrency: int, name: str
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
                body |= {"temperature": 0, "ignore_eos": True, "stream": True}
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
    return run_record(name, concurrency, seconds, results, **change)


def drive_server(
    url: str, model: str, prompts: Sequence[list[int]], max_tokens: int, concurrency: int, name: str
) -> Run:
    """All prompts, `concurrency` streams at a time, greedy, `max_tokens` tokens each."""
    return asyncio.run(_drive(url, model, prompts, max_tokens, concurrency, name))
