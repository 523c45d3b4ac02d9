# SPDX-License-Identifier: Apache-2.0
"""Counting rounds in the scheduler's process, where vLLM counts drafts.

vLLM's `SchedulerStats` reach the front-end by msgspec, which keeps declared fields only. So the
counts of a step are appended to `SpecDecodingStats.num_accepted_tokens_per_pos`, where
`take_counts` finds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ddtree import integration
from vllm_ddtree.metrics.rounds import RoundCounts
from vllm_ddtree.round.kinds import RoundKind
from vllm_ddtree.round.marks import cut_to, is_tried, plain_is_faster, shared_nodes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.spec_decode.metrics import SpecDecodingStats


class RoundCounter:
    """Counts the rounds of a scheduler's steps.

    These are exactly the ones that vLLM counts as drafts, and decode steps of requests without
    drafts.

    Args:
        scheduler: vLLM's.
        top_k: candidates a draft position.

    """

    def __init__(self, scheduler: Scheduler, top_k: int) -> None:
        self._requests = scheduler.requests
        self._num_spec_tokens = scheduler.num_spec_tokens
        self._top_k = top_k
        self._drafted = scheduler.num_spec_tokens  # nodes that the step before had to draft
        self._budget = self._drafted  # for the metric: those, or what a step's trees were cut to
        self._plain = False  # whether that was nothing, because plain decoding is faster
        self._index: dict[str, int] = {}
        # By request, in the order of the index: its kind, and the walk's facts of it.
        self._kinds: list[RoundKind] = []
        self._walked: list[list[int]] = []
        self._none = RoundKind.REFUSED  # the kind of a request with a draft and no node
        self._counts: RoundCounts | None = None

    def step(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> None:
        """A step's output has come and is about to be counted by vLLM."""
        self._index = model_runner_output.req_id_to_index
        lengths = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        drafted, plain = self._drafted, self._plain
        if (cut := cut_to(scheduler_output)) is not None:
            drafted = min(drafted, cut)
        if lengths:
            self._drafted = self._budget = scheduler_output.num_spec_tokens_to_schedule
            self._plain = plain_is_faster(scheduler_output)
            if cut is not None:
                self._budget = min(self._budget, cut)
            if is_tried(scheduler_output):
                self._started().tries += 1
        facts = getattr(model_runner_output, "ddtree_facts", None)
        if facts is not None:
            kinds = facts.kinds
            shared = shared_nodes(scheduler_output) is not None
            self._none = RoundKind.LEFT_OUT if shared else RoundKind.REFUSED
            self._kinds = [kinds.asked if c else kinds.others for c in kinds.chain_only.tolist()]
            self._walked = facts.walked.tolist()
            # Scheduled rows without a node are no draft tokens.
            scheduler_output.num_invalid_spec_tokens = {
                request_id: len(tokens) - self._walked[self._index[request_id]][0]
                for request_id, tokens in drafts.items()
                if request_id in self._index
            }
        if len(drafts) < len(lengths):
            # A step verifies what the one before it had to draft.
            kind = RoundKind.NO_DRAFTS if drafted else RoundKind.BUDGET_0
            if plain:
                kind = RoundKind.PLAIN_FASTER
            for request_id, length in lengths.items():
                if length == 1 and request_id not in drafts and self._decodes(request_id):
                    self._started().rounds[kind] += 1

    def _started(self) -> RoundCounts:
        """The step's counts so far."""
        if self._counts is None:
            self._counts = RoundCounts.none(self._top_k)
            self._counts.budget = self._budget
        return self._counts

    def _decodes(self, request_id: str) -> bool:
        """Whether a request that is still there has had its first token."""
        request = self._requests.get(request_id)
        return bool(request and not request.is_finished() and request.num_output_tokens)

    def round(self, request_id: str, num_accepted: int) -> None:
        """vLLM counts a request's draft of the step."""
        at, counts = self._index[request_id], self._started()
        kind, (nodes, *ranks) = self._kinds[at], self._walked[at]
        if nodes == 0:
            kind = self._none
        elif nodes == 1 and kind == RoundKind.TREE:
            kind = RoundKind.ONE_NODE
        counts.rounds[kind] += 1
        counts.nodes += nodes
        for rank in ranks[:num_accepted]:
            counts.ranks[rank] += 1

    def put_counts(self, stats: SpecDecodingStats | None) -> SpecDecodingStats | None:
        """vLLM's SpecDecodingStats of the step (or None), with the step's counts in them.

        The counts begin anew.
        """
        counts, self._counts = self._counts, None
        if counts is None:
            return stats
        if stats is None:
            stats = integration.new_spec_decoding_stats(self._num_spec_tokens)
        stats.num_accepted_tokens_per_pos += counts.pack()
        return stats


def take_counts(stats: SpecDecodingStats) -> RoundCounts | None:
    """Take the counts out of vLLM's SpecDecodingStats, and leave these as vLLM made them."""
    positions = stats.num_accepted_tokens_per_pos
    if len(positions) == stats.num_spec_tokens:
        return None
    stats.num_accepted_tokens_per_pos = positions[: stats.num_spec_tokens]
    return RoundCounts.unpack(positions[stats.num_spec_tokens :])


def attach(engine_core: EngineCore) -> integration.Observer | None:
    """An observer that counts the rounds of an EngineCore; None if its statistics are off."""
    scheduler = engine_core.scheduler
    if not scheduler.log_stats and scheduler.spec_decode_metrics_level == "none":
        return None
    counter = RoundCounter(scheduler, engine_core.vllm_config.speculative_config.top_k)
    steps = integration.follow(scheduler)
    steps.drafted.append(counter.round)
    steps.counted.append(counter.put_counts)
    return counter.step
