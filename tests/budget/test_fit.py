# SPDX-License-Identifier: Apache-2.0
"""Schedules and steps have trees that leave every running request its rows."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ddtree.budget.fit import StepTokens, fit_schedule, fit_step, largest_fitting

LARGE = StepTokens(scheduled=8192, batched=8192, draft_slots=7)


def nodes_at(ranges: list[tuple[int, int, int]], num_reqs: int) -> int:
    """As vLLM looks a schedule up: in a gap and beyond the last range the range before holds."""
    return [nodes for first, _, nodes in ranges if first <= num_reqs][-1]


def test_a_schedule_that_fits_is_left_alone() -> None:
    ranges = [(1, 4, 31), (8, 16, 15)]
    assert fit_schedule(ranges, LARGE, 64) == ranges


def test_a_fixed_budget_shrinks_by_halves() -> None:
    # 71 tokens a request with 63 nodes: 115 requests; 39 with 31: 210; 23 with 15: 356.
    assert fit_schedule([(1, 256, 63)], LARGE, 256) == [
        (1, 115, 63),
        (116, 210, 31),
        (211, 256, 15),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_every_number_of_requests_fits(seed: int) -> None:
    rng = random.Random(seed)
    tokens = StepTokens(rng.randint(64, 4096), 4096, rng.choice([0, 7, 15]))
    first, ranges = 1, []
    for _ in range(rng.randint(1, 4)):
        last = first + rng.randint(0, 60)
        ranges.append((first, last, rng.choice([0, 1, 3, 7, 31, 63, 200, 255])))
        first = last + rng.randint(1, 9)
    fitted = fit_schedule(ranges, tokens, 128)
    for n in range(1, 129):
        wanted, nodes = nodes_at(ranges, n), nodes_at(fitted, n)
        fits = n * (nodes + 1 + tokens.draft_slots) <= tokens.batched
        assert nodes == 0 or (n * (nodes + 1) <= tokens.scheduled and fits)
        # Never smaller than it must be: the next larger one would not fit.
        assert nodes == wanted or 2 * (nodes + 1) > tokens.largest(n)
        assert nodes <= wanted


def scheduler(drafts: list[int], waiting: int = 0, most: int = 8) -> Any:
    # A request without drafts prefills ten tokens.
    running = [
        SimpleNamespace(
            spec_token_ids=[-1] * n,
            num_tokens_with_spec=10,
            num_output_placeholders=0,
            num_computed_tokens=0,
        )
        for n in drafts
    ]
    config = SimpleNamespace(
        long_prefill_token_threshold=0,
        long_prefill_token_threshold_adaptive=False,
        max_num_batched_tokens=0,
    )
    return SimpleNamespace(
        running=running,
        waiting=[None] * waiting,
        max_num_running_reqs=most,
        scheduler_config=config,
        get_request_counts=lambda: (len(running), waiting),
    )


@pytest.mark.parametrize(("threshold", "left"), [(0, 9), (4, 14)])
def test_prefills_ahead_take_their_tokens_first(threshold: int, left: int) -> None:
    """Two prefills of ten tokens stand before two decodes: a step of 40 tokens has 20 left."""
    of = scheduler([0, 0, 31, 31])
    of.scheduler_config.long_prefill_token_threshold = threshold
    rows = 40 if threshold == 0 else 60  # with a threshold half of the step is the limit
    fit_step(of, StepTokens(rows, rows, 0), ())
    assert lengths(of) == [0, 0, left, left]


@pytest.mark.parametrize(("waiting", "left"), [(0, 1), (6, 5)])
def test_an_adaptive_threshold_is_a_fair_share(waiting: int, left: int) -> None:
    """Of 60 tokens each of four requests may take 15, each of ten 6: prefills take 10, or 6."""
    of = scheduler([0, 0, 31, 31], waiting)
    of.scheduler_config.long_prefill_token_threshold = 4
    of.scheduler_config.long_prefill_token_threshold_adaptive = True
    of.scheduler_config.max_num_batched_tokens = 60
    # 24 tokens less the prefills': 4 rows are left for two requests, or 12.
    fit_step(of, StepTokens(24, 60, 0), ())
    assert lengths(of) == [0, 0, left, left]


def lengths(of: Any) -> list[int]:
    return [len(request.spec_token_ids) for request in of.running]


TIERS = (63, 31, 15, 7, 3, 1, 0)


@pytest.mark.parametrize(
    ("drafts", "waiting", "tokens", "cut", "left"),
    [
        ([63, 63], 0, 128, None, [63, 63]),
        ([63, 63], 0, 127, 31, [31, 31]),
        # A request that waits, or a prefill that runs, keeps half of the step.
        ([63, 63], 1, 255, 31, [31, 31]),
        ([63, 63], 1, 256, None, [63, 63]),
        ([63, 0, 63], 0, 200, 31, [31, 0, 31]),
        # The shorter drafts stay as they are.
        ([63, 3, 1], 0, 60, 15, [15, 3, 1]),
        # No budget with graphs is small enough, or there are none: as many nodes as fit.
        ([63, 63], 0, 5, 1, [1, 1]),
        ([63] * 4, 0, 4, 0, [0] * 4),
        ([], 3, 64, None, []),
    ],
)
def test_a_step(
    drafts: list[int], waiting: int, tokens: int, cut: int | None, left: list[int]
) -> None:
    of = scheduler(drafts, waiting)
    assert fit_step(of, StepTokens(tokens, tokens, 0), TIERS) == cut
    assert lengths(of) == left


def test_without_graphs_as_many_nodes_as_fit() -> None:
    of = scheduler([63, 63])
    assert fit_step(of, StepTokens(100, 100, 0), ()) == 49
    assert lengths(of) == [49, 49]


def test_who_cannot_be_admitted_takes_no_tokens() -> None:
    of = scheduler([63, 63], waiting=9, most=2)
    assert fit_step(of, StepTokens(128, 128, 0), TIERS) is None


def test_draft_slots_count() -> None:
    """vLLM keeps block_size - 1 tokens of the buffers free for every running request."""
    of = scheduler([63] * 4)
    assert fit_step(of, StepTokens(72, 72, 7), ()) == 10
    assert 4 * (10 + 1 + 7) == 72


def test_largest_fitting() -> None:
    assert largest_fitting(TIERS, 30) == 15 and largest_fitting(TIERS, 63) == 63
    assert largest_fitting((7,), 3) == 0


def test_a_limit_of_tree_rows() -> None:
    """Half of a step is more than the rows that a target with recurrent layers keeps."""
    of = scheduler([63] * 4, waiting=1)
    tokens = StepTokens(8192, 8192, 0, tree_rows=100)
    assert fit_step(of, tokens, TIERS) == 15
    assert lengths(of) == [15] * 4
    assert tokens.largest(4) == 24
    assert fit_schedule([(1, 8, 63)], tokens, 4) == [(1, 1, 63), (2, 3, 31), (4, 4, 15)]


def test_rows_that_recurrent_layers_keep() -> None:
    def config(seqs: int, batched: int, sizes: list[int], hybrid: bool = True) -> Any:
        return SimpleNamespace(
            model_config=SimpleNamespace(is_hybrid=hybrid),
            speculative_config=SimpleNamespace(max_num_new_slots_for_drafting=7),
            scheduler_config=SimpleNamespace(
                max_num_seqs=seqs, max_num_batched_tokens=batched, max_num_scheduled_tokens=None
            ),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes),
        )

    def rows(*args: Any) -> int:
        return StepTokens.of(config(*args)).tree_rows

    assert rows(32, 8192, [1, 2, 512]) == 2048
    assert rows(32, 8192, [4096]) == 4096  # a captured graph's rows have room
    assert rows(1500, 8192, []) == 3000  # a root and a node for every request
    assert rows(32, 512, []) == 512
    assert rows(32, 512, [], False) > 10**9
