# SPDX-License-Identifier: Apache-2.0
"""`"budget": "auto"` where a chain is the best form: the engine's steps are those of DFlash's own
chain, in text and in acceptance, and forms that alternate leave the text alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, dflash, greedy, keep_async, run_engine
from vllm_ddtree.budget import auto, cost
from vllm_ddtree.budget.tiers import TIERS
from vllm_ddtree.proposer.speculator import DDTreeSpeculator

CHAIN = 7
GREEDY = [greedy(n) for n in (24, 17, 20, 9)]
MIXED = [*GREEDY[:2], greedy(20, temperature=0.8, seed=4), GREEDY[3]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The form of each verify step whose requests all verify; rounds are made up, as nothing is
    measured without a GPU."""
    keep_async(monkeypatch)
    measure, propose = cost.measure, DDTreeSpeculator.propose
    forms: list[str] = []

    def measured(worker: Any) -> cost.Costs:
        costs = measure(worker)
        costs.rounds = {(budget + 1, 8): 1000.0 for budget in TIERS}
        costs.chains = {(CHAIN + 1, 8): 10.0}
        return costs

    def proposed(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = self.runtime.step
        if step.verified and not step.has_plain_rows:
            forms.append("chain" if step.as_chains else "tree")
        return propose(self, *args, **kwargs)

    monkeypatch.setattr(cost, "measure", measured)
    monkeypatch.setattr(DDTreeSpeculator, "propose", proposed)
    return forms


def auto_budget(pair: Pair) -> dict[str, Any]:
    return {"method": "ddtree", "model": str(pair.drafter), "budget": "auto"}


def test_a_chain_is_dflashs_chain(nano_pair: Pair, steps: list[str]) -> None:
    own = run_engine(nano_pair.target, dflash(nano_pair, CHAIN), PROMPTS[:4], GREEDY)
    got = run_engine(nano_pair.target, auto_budget(nano_pair), PROMPTS[:4], GREEDY)
    assert got.token_ids == own.token_ids
    assert set(steps) == {"chain"} and len(steps) > 3
    assert got.counters.num_drafts == own.counters.num_drafts > 0
    assert got.counters.num_accepted_tokens == own.counters.num_accepted_tokens > 0


def test_forms_alternate(
    nano_pair: Pair, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = itertools.cycle([True, False, False, True, True, False])
    turn = [next(order)]
    monkeypatch.setattr(auto.AutoBudget, "choice", lambda *_: auto.Choice(CHAIN, turn[0]))
    monkeypatch.setattr(auto.Tries, "step", lambda _: turn.__setitem__(0, next(order)))
    got = run_engine(nano_pair.target, auto_budget(nano_pair), PROMPTS[:4], MIXED)
    assert got.token_ids == run_engine(nano_pair.target, None, PROMPTS[:4], MIXED).token_ids
    assert set(steps) == {"chain", "tree"}
