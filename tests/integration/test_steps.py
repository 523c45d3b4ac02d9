# SPDX-License-Identifier: Apache-2.0
"""What follows a scheduler's steps sees each of them once, over a stand-in for vLLM's scheduler."""

from collections.abc import Callable
from typing import Any

import pytest

from vllm_ddtree.integration import follow, observe_steps, steps_of
from vllm_ddtree.patches import scheduler as patches

CALLS: list[tuple[Any, ...]] = []


class Scheduler:
    """Notes what vLLM's own methods are given."""

    @patches.schedule
    def schedule(self, throttle_prefills: bool = False) -> str:
        CALLS.append(("schedule", throttle_prefills))
        return "step"

    @patches.update_from_output
    def update_from_output(self, *step: str) -> str:
        CALLS.append(("update", *step))
        return "outputs"

    @patches.make_spec_decoding_stats
    def make_spec_decoding_stats(self, stats: str, **draft: Any) -> str:
        CALLS.append(("draft", stats, draft))
        return "stats"

    @patches.make_stats
    def make_stats(self, spec_decoding_stats: Any = None, *more: Any) -> str:
        CALLS.append(("stats", spec_decoding_stats, *more))
        return "all stats"


@pytest.fixture
def scheduler() -> Scheduler:
    CALLS.clear()
    return Scheduler()


def run(scheduler: Any) -> None:
    assert scheduler.schedule(True) == "step"
    assert scheduler.update_from_output("a", "b") == "outputs"
    draft = {"request_id": "r", "num_accepted_tokens": 3, "num_draft_tokens": 5}
    assert scheduler.make_spec_decoding_stats("none", **draft) == "stats"
    assert scheduler.make_stats("counted", "more") == "all stats"
    assert scheduler.make_stats() == "all stats"


OWN = [
    ("schedule", True),
    ("update", "a", "b"),
    ("draft", "none", {"request_id": "r", "num_accepted_tokens": 3, "num_draft_tokens": 5}),
    ("stats", "counted", "more"),
    ("stats", None),
]


def test_a_scheduler_that_nobody_follows(scheduler: Scheduler) -> None:
    run(scheduler)
    assert CALLS == OWN
    assert steps_of(scheduler) is None


def test_everybody_is_called_in_order(scheduler: Scheduler) -> None:
    """Observers before the scheduler; what they return, after it."""

    def first(*step: str) -> Callable[[Any], None]:
        CALLS.append(("first", *step))
        return lambda outputs: CALLS.append(("later", outputs))

    def second(*step: str) -> None:
        CALLS.append(("second", *step))

    observe_steps(scheduler, [first])
    observe_steps(scheduler, [second])
    steps = follow(scheduler)
    steps.scheduled.append(lambda step: CALLS.append(("scheduled", step)))
    steps.drafted.append(lambda request, accepted: CALLS.append(("drafted", request, accepted)))
    steps.counted.append(lambda stats: f"{stats} complete")
    run(scheduler)
    assert [
        OWN[0],
        ("scheduled", "step"),
        ("first", "a", "b"),
        ("second", "a", "b"),
        OWN[1],
        ("later", "outputs"),
        ("drafted", "r", 3),
        OWN[2],
        ("stats", "counted complete", "more"),
        ("stats", "None complete"),
    ] == CALLS


def test_another_scheduler_of_the_class_is_left_alone(scheduler: Scheduler) -> None:
    steps = follow(Scheduler())
    steps.scheduled.append(lambda step: CALLS.append(("scheduled", step)))
    run(scheduler)
    assert CALLS == OWN
