# SPDX-License-Identifier: Apache-2.0
"""Each round of the engine accepts what the offline oracle (tests/oracle) says that it accepts.

Output alone cannot show a drafter that sees the wrong context, a tree that lost a node or a slot
that another row overwrote: those only make fewer tokens be accepted.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from torch import Tensor

from tests.conftest import Pair
from tests.engine.harness import (
    PROMPTS,
    Counters,
    Draft,
    Result,
    ddtree,
    dflash,
    generate,
    greedy,
    open_engine,
    run_engine,
    watch_reaches,
)
from tests.engine.known import model_runner
from tests.oracle import Drafter, Round, Target, Trace
from vllm_ddtree.budget import auto, cost
from vllm_ddtree.budget.tiers import TIERS
from vllm_ddtree.proposer import reach, speculator
from vllm_ddtree.round.meter import ONE

# KV blocks end inside drafts and trees; the third request ends at the length limit, in mid-tree.
MAX_MODEL_LEN = 136
ENGINE: dict[str, Any] = {"block_size": 32, "max_num_batched_tokens": 1024}
REQUESTS: list[tuple[str, int, dict[str, Any]]] = [
    (PROMPTS[0], 22, {}),
    (PROMPTS[3], 20, {"temperature": 0.8, "seed": 5}),
    (PROMPTS[5], 99, {}),
    # Penalties depend on the tokens before a row: the chain alone is verified.
    (PROMPTS[2], 20, {"presence_penalty": 0.5}),
]
CHAIN = [False, False, False, True]
GREEDY = [0, 2]


@functools.cache
def traces(pair: Pair) -> list[Trace]:
    """The requests with the target's own continuations, known beyond their ends."""
    target = Target.load(pair.target)
    drafter = Drafter.load(pair.drafter, target)
    prompts = [prompt for prompt, _, _ in REQUESTS]
    lengths = [min(n, MAX_MODEL_LEN - 101) + pair.block_size for _, n, _ in REQUESTS]
    params = [greedy(n, **more) for n, (_, _, more) in zip(lengths, REQUESTS, strict=True)]
    plain = run_engine(pair.target, None, prompts, params, **ENGINE)
    return [
        Trace(target, drafter, output.prompt_token_ids, tokens)
        for output, tokens in zip(plain.outputs, plain.token_ids, strict=True)
    ]


def serve(pair: Pair, spec: dict[str, Any]) -> Result:
    """The requests through an engine of their own."""
    return run_engine(
        pair.target,
        spec,
        [prompt for prompt, _, _ in REQUESTS],
        [greedy(n, **more) for _, n, more in REQUESTS],
        max_model_len=MAX_MODEL_LEN,
        per_request_spec_decode_metrics="detailed",
        **ENGINE,
    )


@functools.cache
def served(pair: Pair, budget: int, **keys: int) -> Result:
    return serve(pair, ddtree(pair, budget, **keys))


def oracle(
    pair: Pair, budget: int, top_k: int = 16, num_speculative_tokens: int | None = None
) -> list[list[Round]]:
    result = []
    for trace, (_, max_tokens, _), chain in zip(traces(pair), REQUESTS, CHAIN, strict=True):
        rounds = trace.replay(
            budget=budget,
            top_k=min(top_k, budget),
            depth=num_speculative_tokens,
            chain=chain,
            max_tokens=min(max_tokens, len(trace.tokens) - trace.num_prompt_tokens),
            max_model_len=MAX_MODEL_LEN,
        )
        assert all(r.complete for r in rounds)
        result.append(rounds)
    return result


def check_counters(counters: Counters, result: Result, depth: int, budget: int) -> None:
    """vLLM's counters, by position = depth, against the requests' own metrics."""
    steps = [output.outputs[0].spec_decode_metrics for output in result.outputs]
    accepted = [n for step in steps for n in step.per_step_accepted]
    assert counters.num_drafts == len(accepted)
    assert counters.num_accepted_tokens == sum(accepted)
    assert counters.num_draft_tokens == sum(n for step in steps for n in step.per_step_drafted)
    assert counters.acceptance_length == 1 + sum(accepted) / len(accepted)
    by_depth = [sum(n > d for n in accepted) for d in range(min(depth, budget))]
    assert list(counters.per_position) == by_depth


@pytest.mark.parametrize(
    ("budget", "keys"),
    [
        (1, {}),
        (3, {}),
        (5, {}),
        (7, {"top_k": 2}),
        (8, {"num_speculative_tokens": 3}),
        (15, {"top_k": 2, "num_speculative_tokens": 5}),
        (31, {}),
    ],
    ids=lambda v: str(v).replace(" ", ""),
)
def test_rounds_are_the_oracles(pair: Pair, budget: int, keys: dict[str, int]) -> None:
    expected = oracle(pair, budget, **keys)
    result = served(pair, budget, **keys)
    for i, (trace, rounds) in enumerate(zip(traces(pair), expected, strict=True)):
        tokens = result.token_ids[i]
        known = trace.tokens[trace.num_prompt_tokens :]
        assert tokens == known[: len(tokens)]
        assert len(tokens) == 1 + sum(r.emitted for r in rounds)
        drafted = [r for r in rounds if r.num_nodes]
        metrics = result.outputs[i].outputs[0].spec_decode_metrics
        assert metrics.per_step_accepted == [r.accepted for r in drafted]
        assert metrics.per_step_drafted == [r.num_nodes for r in drafted]
    depth = keys.get("num_speculative_tokens", pair.block_size - 1)
    check_counters(result.counters, result, depth, budget)


def test_the_length_limit_cuts_trees(pair: Pair) -> None:
    """The third request is what it says: the engine's last trees lose nodes, the text fills it."""
    output = served(pair, 31).outputs[2]
    drafted = output.outputs[0].spec_decode_metrics.per_step_drafted
    assert drafted[0] == 31 and 0 < drafted[-1] < 31
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == MAX_MODEL_LEN


def test_a_tree_accepts_more_than_the_chain(pair: Pair) -> None:
    """Than vLLM's own, from the same drafter: a tree of the chain's nodes and more."""
    trees = served(pair, 31)
    chains = serve(pair, dflash(pair))
    lengths = []
    for result in (trees, chains):
        outputs = [result.outputs[i].outputs[0] for i in GREEDY]
        accepted = [n for o in outputs for n in o.spec_decode_metrics.per_step_accepted]
        lengths.append(sum(accepted) / len(accepted))
    assert [trees.token_ids[i] for i in GREEDY] == [chains.token_ids[i] for i in GREEDY]
    assert lengths[0] > 1.1 * lengths[1] > 0


AUTO = list(range(0, 3, 2))
"""Requests of the tests of `auto`: one of them ends at the length limit."""


def serve_auto(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, list[Draft], Tensor]:
    """Serves `AUTO` with an automatic budget: also all drafts, and what the meter counted."""
    drafts = watch_reaches(monkeypatch)
    requests = [REQUESTS[i] for i in AUTO]
    with open_engine(
        pair.target,
        {"method": "ddtree", "model": str(pair.drafter), "budget": "auto"},
        max_model_len=MAX_MODEL_LEN,
        per_request_spec_decode_metrics="detailed",
        **ENGINE,
    ) as llm:
        meter = model_runner(llm).model_state.runtime.meter
        before = meter.totals.clone()
        result = generate(llm, [r[0] for r in requests], [greedy(r[1], **r[2]) for r in requests])
        return result, drafts, meter.totals - before


def oracle_of_drafts(
    pair: Pair, result: Result, drafts: list[Draft]
) -> list[list[tuple[Draft, Round | None]]]:
    """Of each request in `AUTO`, its drafts with the oracle's rounds, which the engine's are. No
    round verifies a draft without nodes, and the draft that finds the request at its end."""
    by_request = []
    for i, output in zip(AUTO, result.outputs, strict=True):
        trace = traces(pair)[i]
        tokens = output.outputs[0].token_ids
        known = trace.tokens[trace.num_prompt_tokens :]
        assert tokens == known[: len(tokens)]
        position = trace.num_prompt_tokens
        end = position + len(tokens)
        rounds: list[tuple[Draft, Round | None]] = []
        for draft in drafts:
            if position + 1 == end:
                rounds.append((draft, None))
                break
            if draft.nodes == 0:
                position += 1
                rounds.append((draft, None))
                continue
            found = trace.round(
                position,
                end,
                budget=draft.nodes,
                top_k=16,
                num_masks=draft.masks,
                max_model_len=MAX_MODEL_LEN,
            )
            position += found.emitted
            rounds.append((draft, found))
        metrics = output.outputs[0].spec_decode_metrics
        drafted = [found for _, found in rounds if found and found.num_nodes]
        assert metrics.per_step_accepted == [r.accepted for r in drafted]
        assert metrics.per_step_drafted == [r.num_nodes for r in drafted]
        by_request.append(rounds)
    return by_request


def test_rounds_of_narrow_drafts(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other draft has few masks. Each round accepts what the oracle accepts of such drafts,
    and the meter counts it apart."""
    masks = 3
    monkeypatch.setattr(reach, "NARROW", masks)
    monkeypatch.setattr(speculator, "LONGEST_EVERY", 10**6)
    shapes = {(budget + 1, 2): 10.0 for budget in TIERS}
    narrow = {shape: 9.0 for shape in shapes if 1 < shape[0] <= masks + 1}
    monkeypatch.setattr(cost, "measure", lambda worker: cost.Costs(shapes, {}, narrow))
    order = itertools.cycle([(3, True), (3, False), (1, True), (7, True), (3, True), (0, False)])
    turn = [next(order)]
    monkeypatch.setattr(
        auto.AutoBudget, "wanted", lambda *_: auto.Choice(turn[0][0], False, turn[0][1])
    )
    monkeypatch.setattr(auto.Tries, "step", lambda _: turn.__setitem__(0, next(order)))
    result, drafts, counted = serve_auto(nano_pair, monkeypatch)
    assert {draft.masks for draft in drafts} == {None, masks}
    for draft in drafts:
        # Seven nodes, and paths of seven, need more positions than few masks have.
        assert draft.masks is None or max(draft.nodes, draft.verified) <= masks
    narrow_rounds = [
        found
        for rounds in oracle_of_drafts(nano_pair, result, drafts)
        for draft, found in rounds
        if draft.masks is not None and found and found.num_nodes
    ]
    assert len(narrow_rounds) > 5
    # The meter also has a round that ends a request, cut to the tokens that were left.
    by_row = counted[6:].tolist()
    assert by_row[0][0] // ONE >= len(narrow_rounds)
    assert sum(by_row[1][1:]) >= sum(found.accepted for found in narrow_rounds)


def test_rounds_of_changing_reaches(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that changes at every step: each draft has the positions it needs, and each round
    accepts what the oracle accepts of such drafts. The meter counts the trees of the longest."""
    every = 5
    monkeypatch.setattr(speculator, "LONGEST_EVERY", every)
    costs = cost.Costs({(budget + 1, 2): 10.0 for budget in TIERS})
    monkeypatch.setattr(cost, "measure", lambda worker: costs)
    order = itertools.cycle([3, 3, 1, 7, 3, 0, 15, 1, 3, 5, 3])
    monkeypatch.setattr(auto.AutoBudget, "__getitem__", lambda self, num_reqs: next(order))
    result, drafts, counted = serve_auto(nano_pair, monkeypatch)
    turn = 0
    for draft in drafts:
        turn += draft.nodes > 0
        longest = draft.nodes > 0 and (turn % every == 1 or draft.verified == 0)
        short = max(draft.nodes, draft.verified) <= 3 and not longest
        assert draft.positions == (3 if short else 7), draft
    by_request = oracle_of_drafts(nano_pair, result, drafts)
    assert int(counted[0, 0]) // ONE == sum(
        draft.positions == 7 for rounds in by_request for draft, _ in rounds
    )
