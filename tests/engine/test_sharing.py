# SPDX-License-Identifier: Apache-2.0
"""Requests that share the nodes of a step: the same tokens, in the rounds that an oracle finds.

The oracle grows every tree from its own draft, shares by the reference, and calibrates by what it
has accepted itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.conftest import NANO
from tests.engine.harness import (
    PROMPTS,
    Result,
    ddtree,
    generate,
    greedy,
    keep_async,
    open_engine,
    run_engine,
)
from tests.engine.ranks import record, rounds
from tests.oracle import Drafter, Target, Trace
from vllm_ddtree.budget.share import Sharing
from vllm_ddtree.round.marks import shared_nodes
from vllm_ddtree.round.meter import ONE
from vllm_ddtree.share.reference import BINS, DEPTHS, bin_of, chances, share_nodes, worths
from vllm_ddtree.tree.reference import accepted_path

MAX_MODEL_LEN = 200
ENGINE: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 1024,
    "block_size": 32,
}
REQUESTS: list[tuple[str, int, dict[str, Any]]] = [
    (PROMPTS[0], 30, {}),
    (PROMPTS[3], 24, {"temperature": 0.8, "seed": 5}),
    # To three tokens below the length limit: its last trees have less room than the others.
    (PROMPTS[5], MAX_MODEL_LEN - 3 - 101, {}),
    # Penalties depend on the tokens before a row: the chain alone is verified.
    (PROMPTS[2], 40, {"presence_penalty": 0.5}),
    (PROMPTS[1], 50, {"temperature": 1.0, "seed": 7}),
]
CHAIN = 3


@functools.cache
def traces() -> list[Trace]:
    """The requests with the target's own continuations, known beyond their ends."""
    target = Target.load(NANO.target)
    drafter = Drafter.load(NANO.drafter, target)
    prompts = [prompt for prompt, _, _ in REQUESTS]
    params = [greedy(n + NANO.block_size, **more) for _, n, more in REQUESTS]
    plain = run_engine(NANO.target, None, prompts, params, **{**ENGINE, "max_model_len": 512})
    return [
        Trace(target, drafter, output.prompt_token_ids, tokens)
        for output, tokens in zip(plain.outputs, plain.token_ids, strict=True)
    ]


@dataclass
class Served:
    """A request as the oracle serves it."""

    trace: Trace
    chain: bool
    end: int
    """Tokens that it ends with."""
    position: int
    """Of the root."""
    most: set[int] = field(default_factory=set)
    """Nodes that its steps had room for."""
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def grow(self, budget: int) -> tuple[Any, torch.Tensor, int]:
        """The tree, its claims int64 [budget], and the most nodes that there is room for."""
        masks = self.trace.drafter.block_size - 1
        tree = self.trace.grow(
            self.position, budget, min(16, budget), None, self.chain, masks, MAX_MODEL_LEN
        )
        claims = torch.zeros(budget, dtype=torch.int64)
        scores = torch.from_numpy(tree.scores[1:].copy())
        claims[: tree.num_nodes] = (scores.exp() * ONE).long()
        most = min(budget, MAX_MODEL_LEN - 2 - self.position)
        self.most.add(most)
        return tree, claims, most

    def walk(self, tree: Any, nodes: int) -> list[int]:
        """Accept what the first so many nodes hold of the known text; the accepted rows."""
        known, after = self.trace.tokens, self.position + 1
        rows, _ = accepted_path(tree, np.array([known[after + int(d)] for d in tree.depths]))
        rows = [row for row in rows if row <= nodes]
        self.drafted.append(min(nodes, tree.num_nodes))
        self.accepted.append(len(rows))
        self.position += min(len(rows) + 1, self.end - after)
        return rows


def oracle(budget: int, mean: int) -> list[Served]:
    """The requests, all of which begin in one step."""
    served = [
        Served(
            trace,
            i == CHAIN,
            min(trace.num_prompt_tokens + n, MAX_MODEL_LEN),
            trace.num_prompt_tokens,
        )
        for i, (trace, (_, n, _)) in enumerate(zip(traces(), REQUESTS, strict=True))
    ]
    counts = torch.zeros(2, DEPTHS, BINS, dtype=torch.int64)
    while running := [each for each in served if each.position + 1 < each.end]:
        grown = [each.grow(budget) for each in running]
        capacities = torch.tensor([most for _, _, most in grown])
        claims = torch.stack([claims for _, claims, _ in grown])
        depths = torch.ones(len(running), budget, dtype=torch.int64)
        for row, (tree, _, _) in zip(depths, grown, strict=True):
            row[: tree.num_nodes] = torch.from_numpy(tree.depths[1:].copy())
        total = mean * len(running)
        if len(running) > 1 and total < capacities.sum():
            shares = share_nodes(chances(claims, depths, worths(counts)), capacities, total)
        elif len(running) > 1:
            shares = capacities
        else:
            shares = capacities.clamp(max=mean)
        for each, (tree, own, _), depth, nodes in zip(
            running, grown, depths, shares.tolist(), strict=True
        ):
            rows = each.walk(tree, nodes)
            for node in range(min(nodes, tree.num_nodes)):
                if own[node]:
                    cell = (int(depth[node]), int(bin_of(own[node])))
                    counts[0][cell] += own[node]
                    counts[1][cell] += node + 1 in rows
    return served


def serve(spec: dict[str, Any] | None, **more: Any) -> Result:
    return run_engine(
        NANO.target,
        spec,
        [prompt for prompt, _, _ in REQUESTS],
        [greedy(n, **params) for _, n, params in REQUESTS],
        **{**ENGINE, **more},
    )


@pytest.mark.parametrize(("budget", "mean"), [(7, 1), (15, 3), (31, 8), (2, 1)])
def test_rounds_are_the_oracles(budget: int, mean: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DDTREE_CHECK", "1")
    expected = oracle(budget, mean)
    spec = ddtree(NANO, budget, mean_budget=mean)
    result = serve(spec, per_request_spec_decode_metrics="detailed")
    lengths = set()
    for trace, tokens, output, each in zip(
        traces(), result.token_ids, result.outputs, expected, strict=True
    ):
        known = trace.tokens[trace.num_prompt_tokens :]
        assert tokens == known[: len(tokens)]
        metrics = output.outputs[0].spec_decode_metrics
        assert metrics.per_step_drafted == each.drafted
        assert metrics.per_step_accepted == each.accepted
        lengths.update(each.drafted)
    assert len(lengths) > 2, "nothing was shared"
    assert budget < 7 or min(expected[2].most) < budget, "all had the same room"


class Steps:
    """Steps of an engine: shared, and not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shared = self.others = 0
        scheduled = Sharing.scheduled

        def watched(sharing: Sharing, output: Any) -> None:
            scheduled(sharing, output)
            if shared_nodes(output) is not None:
                self.shared += 1
            elif output.num_scheduled_tokens:
                self.others += 1

        monkeypatch.setattr(Sharing, "scheduled", watched)


def mixed_requests() -> tuple[list[str], list[SamplingParams]]:
    """More than run at once; some want what only the host's own lengths give."""
    grammar = StructuredOutputsParams(regex="[a-z]{3,}( [a-z]+)*")
    params = [
        greedy(24),
        greedy(20, temperature=0.9, seed=1),
        greedy(16, temperature=0.7, seed=2, top_k=20, top_p=0.9),
        greedy(20, frequency_penalty=0.3),
        greedy(5, logprobs=2),
        greedy(24, temperature=1.0, seed=3),
        greedy(6, structured_outputs=grammar),
        greedy(30),
        greedy(20, temperature=0.5, seed=4),
    ]
    return [PROMPTS[i % len(PROMPTS)] for i in range(len(params))], params


@pytest.mark.parametrize("asynchronous", [False, True])
def test_as_plain_with_prefills_grammars_and_logprobs(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DDTREE_CHECK", "1")
    if asynchronous:
        keep_async(monkeypatch)
    engine: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 96, "block_size": 32}
    requests = mixed_requests()
    expected = run_engine(NANO.target, None, *requests, **engine)
    steps = Steps(monkeypatch)
    spec = ddtree(NANO, 12, mean_budget=3)
    with open_engine(NANO.target, spec, **engine) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == asynchronous
        result = generate(llm, *requests)
    assert result.token_ids == expected.token_ids
    assert result.texts == expected.texts
    logprobs = [each.outputs[4].outputs[0].logprobs for each in (result, expected)]
    assert [list(step) for step in logprobs[0]] == [list(step) for step in logprobs[1]]
    assert steps.shared > 5 and steps.others > 5
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens


def test_two_ranks_share_alike() -> None:
    few = {"max_num_seqs": 5, "kv_cache_memory_bytes": 8 << 20}
    spec = ddtree(NANO, 7, mean_budget=2)
    one = serve(spec, **few)
    with open_engine(NANO.target, spec, tensor_parallel_size=2, **{**ENGINE, **few}) as llm:
        llm.collective_rpc(record)
        params = [greedy(n, **more) for _, n, more in REQUESTS]
        two = generate(llm, [prompt for prompt, _, _ in REQUESTS], params)
        assert rounds(llm) > 5
    assert two.token_ids == one.token_ids
    assert two.counters == one.counters
