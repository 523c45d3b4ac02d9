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

from tests.conftest import Pair
from tests.engine.harness import (
    PROMPTS,
    Counters,
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
    spec = {"method": "ddtree", "model": str(nano_pair.drafter), "budget": "auto"}
    requests = list(zip(traces(nano_pair), REQUESTS, strict=True))[:3:2]
    drafts = watch_reaches(monkeypatch)
    with open_engine(
        nano_pair.target,
        spec,
        max_model_len=MAX_MODEL_LEN,
        per_request_spec_decode_metrics="detailed",
        **ENGINE,
    ) as llm:
        meter = model_runner(llm).model_state.runtime.meter
        before = meter.totals.clone()
        result = generate(
            llm, [r[0] for _, r in requests], [greedy(r[1], **r[2]) for _, r in requests]
        )
        counted = (meter.totals - before)[6:].tolist()
    assert {draft.masks for draft in drafts} == {None, masks}
    for draft in drafts:
        # Seven nodes, and paths of seven, need more positions than few masks have.
        assert draft.masks is None or max(draft.nodes, draft.verified) <= masks
    narrow_rounds = narrow_accepted = 0
    for (trace, _), output in zip(requests, result.outputs, strict=True):
        tokens = output.outputs[0].token_ids
        known = trace.tokens[trace.num_prompt_tokens :]
        assert tokens == known[: len(tokens)]
        position = trace.num_prompt_tokens
        end = position + len(tokens)
        rounds: list[Round] = []
        for draft in drafts:
            if position + 1 == end:
                break
            if draft.nodes == 0:
                position += 1
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
            if found.num_nodes:
                rounds.append(found)
                narrow_rounds += draft.masks is not None
                narrow_accepted += found.accepted if draft.masks is not None else 0
        metrics = output.outputs[0].spec_decode_metrics
        assert metrics.per_step_accepted == [r.accepted for r in rounds]
        assert metrics.per_step_drafted == [r.num_nodes for r in rounds]
    assert narrow_rounds > 5
    # The meter also has a round that ends a request, cut to the tokens that were left.
    assert counted[0][0] // ONE >= narrow_rounds and sum(counted[1][1:]) >= narrow_accepted


def test_rounds_of_changing_reaches(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that changes at every step: each draft has the positions it needs, and each round
    accepts what the oracle accepts of such drafts. The meter counts the trees of the longest."""
    every = 5
    monkeypatch.setattr(speculator, "LONGEST_EVERY", every)
    costs = cost.Costs({(budget + 1, 2): 10.0 for budget in TIERS})
    monkeypatch.setattr(cost, "measure", lambda worker: costs)
    order = itertools.cycle([3, 3, 1, 7, 3, 0, 15, 1, 3, 5, 3])
    monkeypatch.setattr(auto.AutoBudget, "__getitem__", lambda self, num_reqs: next(order))
    spec = {"method": "ddtree", "model": str(nano_pair.drafter), "budget": "auto"}
    # One of them ends at the length limit.
    requests = list(zip(traces(nano_pair), REQUESTS, strict=True))[:3:2]
    drafts = watch_reaches(monkeypatch)
    with open_engine(
        nano_pair.target,
        spec,
        max_model_len=MAX_MODEL_LEN,
        per_request_spec_decode_metrics="detailed",
        **ENGINE,
    ) as llm:
        meter = model_runner(llm).model_state.runtime.meter
        before = int(meter.totals[0, 0])
        result = generate(
            llm, [r[0] for _, r in requests], [greedy(r[1], **r[2]) for _, r in requests]
        )
        trees = (int(meter.totals[0, 0]) - before) // ONE
    turn = 0
    for draft in drafts:
        turn += draft.nodes > 0
        longest = draft.nodes > 0 and (turn % every == 1 or draft.verified == 0)
        short = max(draft.nodes, draft.verified) <= 3 and not longest
        assert draft.positions == (3 if short else 7), draft
    expected_trees = 0
    for (trace, _), output in zip(requests, result.outputs, strict=True):
        tokens = output.outputs[0].token_ids
        known = trace.tokens[trace.num_prompt_tokens :]
        assert tokens == known[: len(tokens)]
        position = trace.num_prompt_tokens
        end = position + len(tokens)
        rounds: list[Round] = []
        for draft in drafts:
            expected_trees += draft.positions == 7
            if position + 1 == end:
                break
            if draft.nodes == 0:
                position += 1
                continue
            found = trace.round(
                position,
                end,
                budget=draft.nodes,
                top_k=16,
                max_model_len=MAX_MODEL_LEN,
            )
            position += found.emitted
            rounds += [found] if found.num_nodes else []
        metrics = output.outputs[0].spec_decode_metrics
        assert metrics.per_step_accepted == [r.accepted for r in rounds]
        assert metrics.per_step_drafted == [r.num_nodes for r in rounds]
    assert trees == expected_trees
