# SPDX-License-Identifier: Apache-2.0
"""The round profile's arithmetic is right, on rounds made by hand."""

from __future__ import annotations

from benchmarks.rounds import ROUND_MARK, Event, gaps, split_rounds, summarise


def rounds(count: int, idle: float) -> list[Event]:
    """Rounds of 100 microseconds of work in three kernels, two of them at once, and a pause."""
    events: list[Event] = [("left over", -50.0, -40.0)]
    start = 0.0
    for _ in range(count):
        events.append((f"void {ROUND_MARK}", start, start + 10.0))
        events.append(("gemm", start + 10.0, start + 90.0))
        events.append(("_walk_kernel", start + 20.0, start + 30.0))
        events.append(("_tail_attention_kernel", start + 91.0, start + 100.0))
        start += 100.0 + idle
    return events


def test_rounds_begin_at_the_mark() -> None:
    found = split_rounds(reversed(rounds(4, 5.0)))
    assert [len(each) for each in found] == [4, 4, 4]  # the last may be cut short
    assert all(ROUND_MARK in each[0][0] for each in found)


def test_gaps_are_idle_time_only() -> None:
    assert gaps(rounds(1, 0.0)[1:]) == []  # 1 microsecond between two kernels is none
    (gap,) = gaps(rounds(2, 20.0)[1:])
    assert gap == (20.0, "_tail_attention_kernel", f"void {ROUND_MARK}")


def test_summary() -> None:
    found = summarise(rounds(6, 25.0))
    assert found["rounds"] == 5 and found["round_us"] == 125.0 and found["idle_us"] == 25.0
    assert found["ours_us"] == {"tail": 9.0, "walk": 10.0}
    assert found["kernels"][0] == ("gemm", 80.0, 1.0) and found["launches"] == 4.0
    assert found["slowest"][0] == (125, 25, 4)
    assert summarise(rounds(1, 0.0)) == {"rounds": 0}
