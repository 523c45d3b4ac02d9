# SPDX-License-Identifier: Apache-2.0
"""Counting rounds in the scheduler's process, where vLLM counts drafts.

vLLM's `SchedulerStats` reach the front-end by msgspec, which keeps declared fields only. So a
step's counts go behind the positions of `SpecDecodingStats.num_accepted_tokens_per_pos`, where
`take_counts` finds them.
"""

from typing import Any

import numpy as np

from vllm_ddtree import compat
from vllm_ddtree.metrics.rounds import Form, RoundCounts, StepFacts


class RoundCounter:
    """Counts the rounds of a scheduler's steps: exactly those that vLLM counts as drafts, and the
    decode steps of a request without any.

    Args:
        scheduler: vLLM's.
        top_k: candidates a draft position.

    """

    def __init__(self, scheduler: Any, top_k: int) -> None:
        self._requests = scheduler.requests
        self._num_spec_tokens = scheduler.num_spec_tokens
        self._top_k = top_k
        self._budget = self._drafted = scheduler.num_spec_tokens
        self._facts: StepFacts | None = None
        self._index: dict[str, int] = {}
        self._seen: list[tuple[int, int]] = []
        self._undrafted = 0

    def step(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """A step's output has come and is about to be counted by vLLM."""
        self._facts = getattr(model_runner_output, "ddtree_facts", None)
        self._index = model_runner_output.req_id_to_index
        lengths = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if lengths:
            # A step verifies what the one before it had to draft.
            self._drafted = self._budget
            self._budget = scheduler_output.num_spec_tokens_to_schedule
        if self._facts is not None:
            # Rows that were scheduled and hold no node are no draft tokens.
            nodes = self._facts.walked[:, 0].tolist()
            scheduler_output.num_invalid_spec_tokens = {
                request_id: len(tokens) - nodes[self._index[request_id]]
                for request_id, tokens in drafts.items()
                if request_id in self._index
            }
        if len(drafts) < len(lengths):
            undrafted = (r for r, n in lengths.items() if n == 1 and r not in drafts)
            self._undrafted += sum(map(self._decodes, undrafted))

    def _decodes(self, request_id: str) -> bool:
        """Whether a request that is still there has had its first token."""
        request = self._requests.get(request_id)
        return bool(request and not request.is_finished() and request.num_output_tokens)

    def round(self, request_id: str, num_accepted: int) -> None:
        """vLLM counts a request's draft of the step."""
        self._seen.append((self._index[request_id], num_accepted))

    def take(self) -> RoundCounts | None:
        """The step's counts, None without a round. They count from nothing afterwards."""
        if not self._seen and not self._undrafted:
            return None
        counts = RoundCounts.none(self._top_k)
        counts.budget = self._budget
        counts.rounds[Form.NO_DRAFTS if self._drafted else Form.BUDGET_0] += self._undrafted
        if self._seen and self._facts is not None:
            index, accepted = np.array(self._seen).T
            forms, walked = self._facts.forms[index], self._facts.walked[index]
            nodes, ranks = walked[:, 0], walked[:, 1:]
            forms = np.where((forms == Form.TREE) & (nodes == 1), Form.ONE_NODE, forms)
            forms = np.where(nodes == 0, Form.NO_DRAFTS, forms)
            counts.nodes = int(nodes.sum())
            counts.rounds += np.bincount(forms, minlength=len(Form))
            on_path = np.arange(ranks.shape[1]) < accepted[:, None]
            counts.ranks += np.bincount(ranks[on_path], minlength=self._top_k)
        self._seen.clear()
        self._undrafted = 0
        return counts

    def put_counts(self, stats: Any) -> Any:
        """vLLM's SpecDecodingStats of the step (or None), with the step's counts in them."""
        counts = self.take()
        if counts is None:
            return stats
        if stats is None:
            stats = compat.new_spec_decoding_stats(self._num_spec_tokens)
        stats.num_accepted_tokens_per_pos += counts.pack()
        return stats


def take_counts(stats: Any) -> RoundCounts | None:
    """The counts in vLLM's SpecDecodingStats, which are then as vLLM made them."""
    positions = stats.num_accepted_tokens_per_pos
    if len(positions) == stats.num_spec_tokens:
        return None
    stats.num_accepted_tokens_per_pos = positions[: stats.num_spec_tokens]
    return RoundCounts.unpack(positions[stats.num_spec_tokens :])


def attach(engine_core: Any) -> None:
    """Count the rounds of an EngineCore, unless its statistics are off."""
    scheduler = engine_core.scheduler
    if not scheduler.log_stats and scheduler.spec_decode_metrics_level == "none":
        return
    counter = RoundCounter(scheduler, engine_core.vllm_config.speculative_config.top_k)
    update, count = scheduler.update_from_output, scheduler.make_spec_decoding_stats
    make_stats = scheduler.make_stats

    def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
        counter.step(scheduler_output, model_runner_output)
        return update(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(*args: Any, **kwargs: Any) -> Any:
        counter.round(kwargs["request_id"], kwargs["num_accepted_tokens"])
        return count(*args, **kwargs)

    def make_stats_with_counts(stats: Any = None, *args: Any, **kwargs: Any) -> Any:
        return make_stats(counter.put_counts(stats), *args, **kwargs)

    scheduler.update_from_output = update_from_output
    scheduler.make_spec_decoding_stats = make_spec_decoding_stats
    scheduler.make_stats = make_stats_with_counts
