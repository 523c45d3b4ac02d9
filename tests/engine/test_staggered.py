# SPDX-License-Identifier: Apache-2.0
"""Requests of every kind that come one after another, chunked prefills between trees, budgets that
change all the time: the text is that of plain decoding."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, greedy, keep_async, open_engine, watch_reaches
from vllm_ddtree.budget import auto, cost
from vllm_ddtree.round.meter import Reading

SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}
ENGINE: dict[str, Any] = {"block_size": 32, "max_num_seqs": 5, "max_num_batched_tokens": 96}
BUDGETS = (7, 5, 3, 1, 0)


def requests() -> list[tuple[str, int, dict[str, Any]]]:
    """Prompt, tokens, sampling."""
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex=r"[a-z ]{12,20}=[0-9]{3}")
    long = PROMPTS[5]
    return [
        (long, 20, {}),
        (PROMPTS[0], 14, SEEDED),
        (PROMPTS[1], 16, {"repetition_penalty": 1.3}),
        (PROMPTS[3], 24, {"structured_outputs": grammar, "ignore_eos": False}),
        (long + " x", 9, {**SEEDED, "logprobs": 3, "presence_penalty": 0.7}),
        (PROMPTS[2], 18, {"min_tokens": 4, "logprobs": 2}),
        (PROMPTS[4], 12, {**SEEDED, "bad_words": ["e"]}),
        (long + "\n", 7, {}),
    ]


def serve(llm: Any) -> list[list[int]]:
    """A new request at every second step."""
    engine = llm.llm_engine
    todo = requests()
    done: dict[str, list[int]] = {}
    for step in itertools.count():
        sent = step // 2
        if step % 2 == 0 and sent < len(todo):
            prompt, tokens, sampling = todo[sent]
            engine.add_request(str(sent), prompt, greedy(tokens, **sampling))
        for output in engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        if sent >= len(todo) and not engine.has_unfinished_requests():
            break
    return [done[str(i)] for i in range(len(todo))]


@functools.cache
def plain(pair: Pair) -> list[list[int]]:
    with open_engine(pair.target, None, block_size=32) as llm:
        return serve(llm)


@pytest.mark.parametrize(
    ("spec", "reaches"),
    [
        (
            {"budget_per_batch_size": [[1, 1, 0], [2, 2, 9], [3, 3, 1], [4, 4, 0], [5, 8, 5]]},
            {7, 3},
        ),
        ({"budget": 3, "top_k": 1, "num_speculative_tokens": 1}, {1}),
        ({"budget": 12, "mean_budget": 2}, {7}),
    ],
    ids=["none in between", "depth 1", "shared"],
)
def test_schedules(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], reaches: set[int]
) -> None:
    keep_async(monkeypatch)
    drafts = watch_reaches(monkeypatch)
    config = {"method": "ddtree", "model": str(nano_pair.drafter), **spec}
    with open_engine(nano_pair.target, config, **ENGINE) as llm:
        assert serve(llm) == plain(nano_pair)
    assert {draft.positions for draft in drafts} == reaches
    assert all(d.positions >= min(max(d.nodes, d.verified), max(reaches)) for d in drafts)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_auto_on_a_live_engine(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """With made-up costs, as without a GPU there are none, and a choice that jumps at every step:
    the hooks of scheduler and meter are the real ones."""
    if asynchronous:
        keep_async(monkeypatch)
    measure = cost.measure
    updates: list[Reading] = []

    def measured(worker: Any) -> cost.Costs:
        costs = measure(worker)
        costs.rounds = {(b + 1, n): 1000.0 + b * n for b in BUDGETS for n in (1, 2, 4, 5)}
        return costs

    order = itertools.cycle([7, 0, 3, 1, 5, 0, 0, 7, 5])
    used = set()

    def choose(self: auto.AutoBudget, num_reqs: int) -> int:
        budget = next(order)
        used.add(budget)
        return budget

    update = auto.Acceptance.update

    def looked(self: auto.Acceptance, counts: Reading, now: float) -> None:
        updates.append(counts)
        update(self, counts, now)

    drafts = watch_reaches(monkeypatch)
    monkeypatch.setattr(cost, "measure", measured)
    monkeypatch.setattr(auto, "READ_EVERY", 8)
    monkeypatch.setattr(auto.AutoBudget, "__getitem__", choose)
    monkeypatch.setattr(auto.Acceptance, "update", looked)
    config = {"method": "ddtree", "model": str(nano_pair.drafter), "budget": "auto"}
    with open_engine(nano_pair.target, config, **ENGINE) as llm:
        assert serve(llm) == plain(nano_pair)
    assert used == set(BUDGETS)
    assert {draft.positions for draft in drafts} == {7, 3}
    assert updates and updates[-1][0][0] > 0 and sum(updates[-1][1]) > 0
