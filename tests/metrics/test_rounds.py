# SPDX-License-Identifier: Apache-2.0
"""The counts of rounds are those of a plain reference, all the way from the runner to the log."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_ddtree.integration import observe_steps, steps_of
from vllm_ddtree.metrics.rounds import RoundCounts
from vllm_ddtree.metrics.scheduler import RoundCounter, attach, take_counts
from vllm_ddtree.patches import scheduler as patches
from vllm_ddtree.round.emitted import StepFacts, with_facts
from vllm_ddtree.round.kinds import LABELS, RoundKind, step_kinds
from vllm_ddtree.round.marks import note_choice, note_cut, share

BUDGET, DEPTH, TOP_K = 12, 4, 6


class Scheduler:
    """Those parts of vLLM's that count, as they stand there (v1/core/sched/scheduler.py)."""

    spec_decode_metrics_level = "none"
    num_spec_tokens = BUDGET

    def __init__(self, log_stats: bool = True) -> None:
        self.log_stats = log_stats
        self.requests: dict[str, Any] = {}

    def update_from_output(self, scheduled: Any, output: Any) -> SchedulerStats | None:
        stats = None
        for request_id in scheduled.num_scheduled_tokens:
            tokens = output.sampled_token_ids[output.req_id_to_index[request_id]]
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id)
            if request_id in self.requests and drafts and tokens:
                stats = self.make_spec_decoding_stats(
                    stats,
                    num_draft_tokens=len(drafts),
                    num_accepted_tokens=len(tokens) - 1,
                    num_invalid_spec_tokens=scheduled.num_invalid_spec_tokens,
                    request_id=request_id,
                )
        return self.make_stats(stats, None)

    def make_spec_decoding_stats(
        self,
        stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats:
        stats = stats or SpecDecodingStats.new(BUDGET)
        num_draft_tokens -= (num_invalid_spec_tokens or {}).get(request_id, 0)
        stats.observe_draft(num_draft_tokens, num_accepted_tokens)
        return stats

    def make_stats(self, stats: Any = None, *_: Any) -> SchedulerStats | None:
        return SchedulerStats(spec_decoding_stats=stats) if self.log_stats else None


for name in ("update_from_output", "make_spec_decoding_stats", "make_stats"):
    setattr(Scheduler, name, getattr(patches, name)(getattr(Scheduler, name)))


def attached(**kwargs: Any) -> Scheduler:
    scheduler = Scheduler(**kwargs)
    spec = SimpleNamespace(top_k=TOP_K)
    config = SimpleNamespace(speculative_config=spec)
    observer = attach(SimpleNamespace(scheduler=scheduler, vllm_config=config))
    observe_steps(scheduler, filter(None, [observer]))
    return scheduler


def over_the_wire(stats: SchedulerStats) -> SchedulerStats:
    """As it goes from the engine core to the front-end."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=SchedulerStats)


def test_counts_against_a_plain_reference() -> None:
    """Random steps: trees, chains, one node, none; requests that are gone or still prefill."""
    rng = np.random.default_rng(1)
    scheduler = attached()
    total, budget, plain = RoundCounts.none(TOP_K), BUDGET, False
    for _ in range(60):
        expected, drafts, accepted_nodes = RoundCounts.none(TOP_K), 0, 0
        num_reqs = int(rng.integers(1, 7))
        names = [f"r{i}" for i in range(num_reqs)]
        order = rng.permutation(num_reqs)
        scheduled = SimpleNamespace(
            num_scheduled_tokens={},
            scheduled_spec_decode_tokens={},
            num_spec_tokens_to_schedule=int(rng.choice([0, 1, 5, BUDGET])),
            num_invalid_spec_tokens={"r0": 3},  # what the scheduler knows is known better
        )
        tried, plain_next = rng.random() < 0.3, rng.random() < 0.3
        note_choice(scheduled, tried, plain_next)
        expected.tries = int(tried)
        shared = rng.random() < 0.2
        if shared:
            share(scheduled, 7)
        chain = rng.integers(0, 2, num_reqs)
        other = RoundKind(rng.choice([RoundKind.TREE, RoundKind.MIXED, RoundKind.CHOSEN]))
        kinds = step_kinds(chain[order], False, other)
        walked = rng.integers(0, TOP_K, (num_reqs, DEPTH + 1)).astype(np.uint8)
        walked[:, 0] = rng.integers(0, 6, num_reqs)
        sampled: list[list[int]] = [[] for _ in names]
        scheduler.requests.clear()
        for row, i in enumerate(order):
            request, nodes = names[i], int(walked[row, 0])
            accepted = int(rng.integers(0, min(nodes, DEPTH) + 1))
            gone, first = rng.random() < 0.2, rng.random() < 0.2
            if not gone:
                scheduler.requests[request] = SimpleNamespace(
                    is_finished=lambda: False, num_output_tokens=0 if first else 3
                )
            if rng.random() < 0.3:  # without drafts
                scheduled.num_scheduled_tokens[request] = 1
                sampled[row] = [7]
                if not gone and not first:
                    without = RoundKind.NO_DRAFTS if budget else RoundKind.BUDGET_0
                    expected.rounds[RoundKind.PLAIN_FASTER if plain else without] += 1
                continue
            rows = max(1, int(rng.integers(nodes, BUDGET)))
            scheduled.num_scheduled_tokens[request] = 1 + rows
            scheduled.scheduled_spec_decode_tokens[request] = [-1] * rows
            sampled[row] = [7] * (accepted + 1)
            if gone:
                continue
            kind = RoundKind.PARAMETERS if chain[i] else other
            if kind == RoundKind.TREE and nodes == 1:
                kind = RoundKind.ONE_NODE
            without = RoundKind.LEFT_OUT if shared else RoundKind.REFUSED
            expected.rounds[kind if nodes else without] += 1
            expected.nodes += nodes
            for rank in walked[row, 1 : accepted + 1]:
                expected.ranks[rank] += 1
            drafts += 1
            accepted_nodes += accepted
        output = ModelRunnerOutput(
            [names[i] for i in order], {names[i]: row for row, i in enumerate(order)}, sampled
        )
        output.ddtree_facts = StepFacts(kinds, walked)
        plain = plain_next
        expected.budget = budget = scheduled.num_spec_tokens_to_schedule
        sent = scheduler.update_from_output(scheduled, pickle.loads(pickle.dumps(output)))
        assert sent is not None
        stats = over_the_wire(sent).spec_decoding_stats
        if stats is None:
            assert not any(expected.rounds)
            continue
        assert take_counts(stats) == expected
        # The rest is as vLLM made it.
        assert len(stats.num_accepted_tokens_per_pos) == BUDGET
        assert (stats.num_drafts, stats.num_draft_tokens) == (drafts, expected.nodes)
        assert sum(stats.num_accepted_tokens_per_pos) == accepted_nodes
        total.add(expected)
    seen = {kind for kind, n in zip(RoundKind, total.rounds, strict=True) if n > 0}
    assert seen == set(RoundKind) - {RoundKind.PROCESSORS}
    assert total.nodes > 0 and min(total.ranks) > 0 and total.tries > 5


@pytest.mark.parametrize(("cut", "shown"), [(None, 12), (3, 3), (0, 0)])
def test_the_budget_of_a_step_that_was_cut(cut: int | None, shown: int) -> None:
    """The metric shows what the step's requests kept. A step cut to nothing has budget 0."""
    scheduler = attached()
    scheduler.requests = {"r0": SimpleNamespace(is_finished=lambda: False, num_output_tokens=3)}
    scheduled = SimpleNamespace(
        num_scheduled_tokens={"r0": 1},
        scheduled_spec_decode_tokens={},
        num_spec_tokens_to_schedule=BUDGET,
        num_invalid_spec_tokens={},
    )
    note_cut(scheduled, cut)
    counter = RoundCounter(scheduler, TOP_K)
    counter.step(scheduled, SimpleNamespace(req_id_to_index={"r0": 0}))
    counts = take_counts(counter.put_counts(None))
    assert counts is not None and counts.budget == shown
    kind = RoundKind.BUDGET_0 if cut == 0 else RoundKind.NO_DRAFTS
    assert counts.rounds[kind] == 1 and sum(counts.rounds) == 1


def test_counts_of_another_method_are_left_alone() -> None:
    stats = SpecDecodingStats.new(3)
    stats.observe_draft(3, 2)
    assert take_counts(stats) is None
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0]


def test_nothing_is_counted_without_statistics() -> None:
    for log_stats in (False, True):
        steps = steps_of(attached(log_stats=log_stats))
        assert steps is not None
        counting = [bool(calls) for calls in (steps.observers, steps.drafted, steps.counted)]
        assert counting == [log_stats] * 3


@pytest.mark.parametrize(("by_processors", "asked"), [(False, "PARAMETERS"), (True, "PROCESSORS")])
def test_kinds(by_processors: bool, asked: str) -> None:
    chain = np.array([0, 1, 0, 1], np.int32)
    for other in (RoundKind.TREE, RoundKind.MIXED, RoundKind.CHOSEN):
        kinds = step_kinds(chain, by_processors, other)
        assert (kinds.asked, kinds.others) == (RoundKind[asked], other)
        assert kinds.chain_only is chain
    assert len(set(LABELS.values())) == len(RoundKind)


def test_facts_leave_with_the_output() -> None:
    """The right half of the sampled tokens, only where a tree sampler made them."""
    wide = np.arange(12).reshape(2, 6)

    def get_output(waiting: Any) -> Any:
        return SimpleNamespace(tokens=waiting.sampled_token_ids.tolist())

    waiting = SimpleNamespace(sampler_output=SimpleNamespace(), sampled_token_ids=wide)
    plain = with_facts(get_output, waiting)
    assert plain.tokens == wide.tolist() and not hasattr(plain, "ddtree_facts")
    kinds = step_kinds(np.zeros(2, np.int32), False, RoundKind.TREE)
    waiting = SimpleNamespace(sampler_output=SimpleNamespace(kinds=kinds), sampled_token_ids=wide)
    output = with_facts(get_output, waiting)
    assert output.tokens == [[0, 1, 2], [6, 7, 8]]
    assert output.ddtree_facts.walked.tolist() == [[3, 4, 5], [9, 10, 11]]
    assert output.ddtree_facts.kinds is kinds
