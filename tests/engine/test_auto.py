# SPDX-License-Identifier: Apache-2.0
"""`auto` in an engine that it steers itself: it decodes plainly, tries drafts, and drafts.

Nothing can be measured without a GPU, so what rounds cost is made up.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, greedy, keep_async, run_engine
from vllm_ddtree.budget import auto, cost
from vllm_ddtree.budget.tiers import TIERS
from vllm_ddtree.budget.tries import Tries
from vllm_ddtree.round.marks import is_tried, plain_is_faster

PARAMS = [greedy(40), greedy(32, temperature=0.8, seed=3), greedy(40, temperature=1.0, seed=5)]


@pytest.mark.parametrize("plain_ms", [5.0, 500.0])
def test_tries_leave_the_text_alone(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch, plain_ms: float
) -> None:
    keep_async(monkeypatch)
    costs = {(budget + 1, 4): 100.0 if budget else plain_ms for budget in TIERS}
    monkeypatch.setattr(cost, "measure", lambda worker: cost.Costs(costs))
    monkeypatch.setattr(cost.Costs, "observe", lambda *_: None)
    monkeypatch.setattr(auto, "READ_EVERY", 5)
    monkeypatch.setattr(auto, "READ_AFTER", 3)
    monkeypatch.setattr(
        Tries, "earn", lambda self, _: self._saved.update(dict.fromkeys(self._saved, 100.0))
    )
    steps: list[tuple[int, bool, bool]] = []
    scheduled = auto.Watch.scheduled

    def see(self: Any, output: Any) -> None:
        scheduled(self, output)
        if output.num_scheduled_tokens:
            nodes = output.num_spec_tokens_to_schedule
            steps.append((nodes, is_tried(output), plain_is_faster(output)))

    monkeypatch.setattr(auto.Watch, "scheduled", see)
    spec = {"method": "ddtree", "model": str(nano_pair.drafter), "budget": "auto"}
    got = run_engine(nano_pair.target, spec, PROMPTS[:3], PARAMS, max_num_seqs=4)
    own = run_engine(nano_pair.target, None, PROMPTS[:3], PARAMS, max_num_seqs=4)
    assert got.token_ids == own.token_ids
    tried = [nodes for nodes, trying, _ in steps if trying]
    usual = [nodes for nodes, trying, _ in steps if not trying]
    assert tried and len(tried) < len(steps)
    if plain_ms < 100:
        # Plain decoding but for samples of drafts.
        assert set(usual) == {0} and all(plain for _, trying, plain in steps if not trying)
        assert all(nodes > 0 for nodes in tried) and got.counters.num_drafts > 0
    else:
        # Drafts, and among the tries other budgets.
        assert 0 not in usual and set(tried) - set(usual)
    assert got.counters.num_accepted_tokens > 0
