# SPDX-License-Identifier: Apache-2.0
"""What the GPU does in a round: time by kernel, and the gaps in which it waits.

`profile_rounds` lets N requests decode together and records a few rounds in the worker that runs
them. It records the CUDA activity of `torch.profiler` alone, so that the host is slowed as little
as possible. The host stays slowed afterwards: what the profiler once hooks into every launch it
leaves there.

`time_rounds` therefore measures without the profiler, in an engine that was never profiled: the
processor time of the thread that schedules steps and launches their kernels, and what lies on the
GPU between a round's last kernel and the next round's forward (`between.py`).

Needs VLLM_ALLOW_INSECURE_SERIALIZATION=1 where the engine core is another process, because a
function is sent to it.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks import between

if TYPE_CHECKING:
    from vllm import LLM

Event = tuple[str, float, float]
"""Name, start and end in microseconds."""

ROUND_MARK = "_prepare_pos_seq_lens_kernel"
"""vLLM launches it once a step (v1/worker/gpu/input_batch.py)."""
GAP = 3.0
"""Microseconds from which idle time counts as a gap: less lies between any two kernels."""

SLOWEST = 12
"""Rounds listed one by one: [microseconds, idle ones, launches]."""

OURS = {
    "top-k": ("_group_max_kernel", "_top_k_kernel"),
    "build": ("_build_trees_kernel",),
    "rows": ("_prepare_rows_kernel",),
    "tail": ("_tail_attention_kernel",),
    "walk": ("_walk_kernel",),
    "compact": ("_compact_kernel",),
    "context": ("_context_rows_kernel", "_gather_states_kernel"),
}
"""Kernels of this project by the columns of benchmarks/kernels.py."""


def clocks(worker: Any) -> tuple[float, float]:
    """(processor time of the thread that runs a worker's steps, time), seconds."""
    return time.thread_time(), time.perf_counter()


def start(worker: Any) -> None:
    """Begin recording in a worker."""
    import torch

    worker._ddtree_profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    )
    torch.cuda.synchronize()
    worker._ddtree_profile.start()


def stop(worker: Any) -> str:
    """End recording; JSON list of [name, start, end] of what ran on the GPU."""
    import torch

    torch.cuda.synchronize()
    profile = worker._ddtree_profile
    profile.stop()
    del worker._ddtree_profile
    found = []
    for event in profile.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()):
            begin = event.start_ns() / 1e3
            found.append((event.name(), begin, begin + event.duration_ns() / 1e3))
    return json.dumps(found)


def split_rounds(events: Iterable[Event], mark: str = ROUND_MARK) -> list[list[Event]]:
    """The events of each whole round, in order; what comes before the first mark is dropped, and
    the last round, which may be cut short."""
    rounds: list[list[Event]] = []
    for event in sorted(events, key=lambda e: e[1]):
        if mark in event[0]:
            rounds.append([])
        if rounds:
            rounds[-1].append(event)
    return rounds[:-1]


def gaps(events: Sequence[Event]) -> list[tuple[float, str, str]]:
    """(microseconds, kernel before, kernel after) of every stretch of idle GPU of `GAP` or more."""
    found = []
    end, before = events[0][2], events[0][0]
    for name, begin, stop_ in events[1:]:
        if begin - end >= GAP:
            found.append((begin - end, before, name))
        if stop_ > end:
            end, before = stop_, name
    return found


def summarise(events: Iterable[Event]) -> dict[str, Any]:
    """Medians over the rounds: length, idle time, time and launches by kernel (microseconds)."""
    rounds = split_rounds(events)
    if len(rounds) < 2:
        return {"rounds": len(rounds)}
    lengths = [b[0][1] - a[0][1] for a, b in itertools.pairwise(rounds)]
    # A gap at a round's end shows only with the next round's first event.
    idle = [gaps([*a, b[0]]) for a, b in itertools.pairwise(rounds)]
    by_name: dict[str, list[float]] = defaultdict(list)
    for index, events_ in enumerate(rounds):
        for name, begin, end in events_:
            by_name.setdefault(name, [0.0] * len(rounds))[index] += end - begin
    times = {name: statistics.fmean(each) for name, each in by_name.items()}
    counts: dict[str, float] = defaultdict(float)
    for events_ in rounds:
        for name, _, _ in events_:
            counts[name] += 1 / len(rounds)
    ours = {
        label: sum(t for name, t in times.items() if name.split("(")[0] in names)
        for label, names in OURS.items()
    }
    launches = [len(each) for each in rounds]
    slow = sorted(range(len(lengths)), key=lambda i: -lengths[i])[:SLOWEST]
    middle = sorted(range(len(idle)), key=lambda i: sum(g[0] for g in idle[i]))[len(idle) // 2]
    return {
        "rounds": len(rounds),
        "round_us": statistics.median(lengths),
        "idle_us": statistics.median(sum(gap for gap, _, _ in each) for each in idle),
        "gaps": [(round(gap, 1), a[:60], b[:60]) for gap, a, b in idle[middle]],
        "ours_us": {label: round(t, 2) for label, t in ours.items() if t},
        "launches": round(sum(counts.values()), 1),
        "slowest": [
            (round(lengths[i]), round(sum(gap for gap, _, _ in idle[i])), launches[i]) for i in slow
        ],
        "kernels": [
            (name[:120], round(t, 1), round(counts[name], 1))
            for name, t in sorted(times.items(), key=lambda item: -item[1])
        ],
    }


@contextmanager
def decoding(
    llm: LLM, prompts: Sequence[list[int]], num_reqs: int, max_tokens: int
) -> Iterator[Callable[[float], int]]:
    """Within, `num_reqs` requests decode together; yields what takes steps for so many seconds and
    counts them.

    A request that ends is replaced by the next prompt (they are taken again and again), so with few
    `max_tokens` steps with prefills are among the rounds.

    Args:
        llm: an engine with nothing to do.
        prompts: token ids, `num_reqs` or more.
        num_reqs: concurrency.
        max_tokens: output tokens of a request.

    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    numbers = itertools.count()

    def submit() -> str:
        number = next(numbers)
        name = f"round-{number}"
        prompt = prompts[number % len(prompts)]
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    running = {submit() for _ in range(num_reqs)}
    started: set[str] = set()

    def step() -> None:
        for output in engine.step():
            started.add(output.request_id)
            if output.finished:
                running.discard(output.request_id)
                running.add(submit())

    def steps(seconds: float) -> int:
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            step()
            count += 1
        return count

    while len(started) < num_reqs:
        step()
    yield steps
    engine.abort_request(list(running))
    while engine.has_unfinished_requests():
        engine.step()


def time_rounds(
    llm: LLM, prompts: Sequence[list[int]], num_reqs: int, seconds: float, max_tokens: int
) -> dict[str, Any]:
    """Rounds of `num_reqs` requests without a profiler: microseconds of a round, of the host's
    thread, and between two rounds on the GPU. Arguments as `decoding`'s."""
    with decoding(llm, prompts, num_reqs, max_tokens) as steps:
        before = llm.collective_rpc(clocks)[0]
        count = steps(seconds)
        host, wall = (b - a for a, b in zip(before, llm.collective_rpc(clocks)[0], strict=True))
        llm.collective_rpc(between.start)
        steps(seconds)
        pauses = llm.collective_rpc(between.stop)[0]
    return {
        "rounds": count,
        "round_us": wall / count * 1e6,
        "host_us": host / count * 1e6,
        "between_us": between.spread(pauses),
    }


def profile_rounds(
    llm: LLM, prompts: Sequence[list[int]], num_reqs: int, seconds: float, max_tokens: int
) -> dict[str, Any]:
    """Profile `seconds` of `num_reqs` requests that decode together. Arguments as `decoding`'s."""
    with decoding(llm, prompts, num_reqs, max_tokens) as steps:
        steps(seconds)
        llm.collective_rpc(start)
        steps(seconds)
        events = json.loads(llm.collective_rpc(stop)[0])
    return summarise((name, begin, end) for name, begin, end in events)
