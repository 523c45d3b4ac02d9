# SPDX-License-Identifier: Apache-2.0
"""`budget_per_batch_size`: the number of nodes changes while requests run, the text does not."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, Result, greedy, run_engine

SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 5}
# Requests end one after another, so every range is passed through.
TOKENS = [3, 6, 10, 16]
PARAMS: list[dict[str, Any]] = [{}, SEEDED, {}, SEEDED]


@functools.cache
def plain(pair: Pair) -> Result:
    params = [greedy(n, **more) for n, more in zip(TOKENS, PARAMS, strict=True)]
    return run_engine(pair.target, None, PROMPTS[:4], params)


@pytest.mark.parametrize(
    "spec",
    [
        {"budget_per_batch_size": [[1, 1, 15], [2, 2, 5], [3, 8, 7]]},
        {"budget_per_batch_size": [[1, 2, 9], [3, 8, 0]]},  # no drafts at the start
        {"budget": "auto"},  # without graphs to measure: its prior schedule
    ],
    ids=["shrinking", "from none", "auto"],
)
def test_budgets_change_in_mid_request(nano_pair: Pair, spec: dict[str, Any]) -> None:
    params = [greedy(n, **more) for n, more in zip(TOKENS, PARAMS, strict=True)]
    expected = plain(nano_pair)
    config = {"method": "ddtree", "model": str(nano_pair.drafter), **spec}
    got = run_engine(nano_pair.target, config, PROMPTS[:4], params)
    assert got.token_ids == expected.token_ids
    counters = got.counters
    assert counters.num_drafts > 0
    if spec.get("budget") != "auto":
        sizes = {nodes for _, _, nodes in spec["budget_per_batch_size"] if nodes}
        smallest, largest = min(sizes), max(sizes)
        mean = counters.num_draft_tokens / counters.num_drafts
        assert smallest < mean <= largest if len(sizes) > 1 else mean == largest
