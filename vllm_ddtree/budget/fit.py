# SPDX-License-Identifier: Apache-2.0
"""No running request waits because another one's tree is wide.

A step has a limited number of tokens. vLLM's scheduler serves running requests in order, each with
its whole draft, until no token is left; the rest wait. A chain is short, so few ever wait. A tree
of 63 nodes takes 64 tokens, so a step of 2,048 tokens would advance 32 requests and no prefill.

Trees shrink instead. `fit_schedule` does so for every number of requests when the engine starts,
`largest_fitting` when a budget is chosen, and `fit_step` at the beginning of a step, when requests
have joined since the drafts were chosen. The first nodes of a tree are its best ones, so a tree
that is cut is the best tree of that size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_ddtree import integration
from vllm_ddtree.budget.tiers import TIERS
from vllm_ddtree.recurrent.capacity import max_tree_rows
from vllm_ddtree.round.marks import note_cut

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

logger = init_logger("vllm.ddtree")

Range = tuple[int, int, int]
"""(first request, last request, nodes)"""


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a step, and what a request takes of them beside its rows."""

    scheduled: int
    """Tokens that the scheduler may give out in a step."""
    batched: int
    """Tokens that the runner's buffers hold."""
    draft_slots: int
    """Tokens of the buffers that the scheduler keeps free for each request's draft."""
    tree_rows: int = sys.maxsize
    """Most rows of all trees together, where the target keeps something of each."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> StepTokens:
        """Those of an engine's configuration (v1/core/sched/scheduler.py, `schedule`)."""
        scheduler = vllm_config.scheduler_config
        batched = scheduler.max_num_batched_tokens
        return cls(
            scheduler.max_num_scheduled_tokens or batched,
            batched,
            vllm_config.speculative_config.max_num_new_slots_for_drafting,
            max_tree_rows(vllm_config) if vllm_config.model_config.is_hybrid else sys.maxsize,
        )

    def for_rows(self, num_reqs: int) -> int:
        """Rows that a step can give to `num_reqs` requests together."""
        return min(self.scheduled, self.batched - self.draft_slots * num_reqs)

    def largest(self, num_reqs: int) -> int:
        """The most nodes that each of `num_reqs` requests can verify in one step."""
        return max(0, min(self.for_rows(num_reqs), self.tree_rows) // num_reqs - 1)


def largest_fitting(budgets: Iterable[int], most: int) -> int:
    """The largest of `budgets` that is at most `most`; 0 if there is none."""
    return max((budget for budget in budgets if budget <= most), default=0)


def _smaller(budget: int) -> Iterable[int]:
    """A budget and what it shrinks to, step by step: about half as many nodes each time."""
    while budget > 0:
        yield budget
        budget = (budget + 1) // 2 - 1


def fit_schedule(ranges: Sequence[Range], tokens: StepTokens, max_num_seqs: int) -> list[Range]:
    """A schedule whose trees all fit a step, for every number of running requests.

    Args:
        ranges: (first request, last request, nodes), ascending. In a gap, and beyond the last
            range, the range before holds.
        tokens: of a step.
        max_num_seqs: most running requests.

    Returns:
        `ranges` themselves if they fit. Else ranges without a gap up to `max_num_seqs`, in which a
        budget that does not fit is halved until it does.

    """
    fitted: list[Range] = []
    at, changed = 0, False
    for num_reqs in range(1, max_num_seqs + 1):
        while at + 1 < len(ranges) and ranges[at + 1][0] <= num_reqs:
            at += 1
        budget = ranges[at][2]
        nodes = largest_fitting(_smaller(budget), tokens.largest(num_reqs))
        changed |= nodes != budget
        if fitted and fitted[-1][2] == nodes:
            fitted[-1] = (fitted[-1][0], num_reqs, nodes)
        else:
            fitted.append((num_reqs, num_reqs, nodes))
    return fitted if changed else list(ranges)


def _most_of_a_prefill(scheduler: Scheduler) -> int:
    """Tokens that vLLM gives one prefill beside other requests; 0: all that there are.

    `--long-prefill-token-threshold`, or a fair share of the step with
    `--long-prefill-token-threshold-adaptive` (v1/core/sched/scheduler.py, `schedule`).
    """
    config = scheduler.scheduler_config
    threshold = config.long_prefill_token_threshold
    if threshold > 0 and config.long_prefill_token_threshold_adaptive:
        return max(threshold, config.max_num_batched_tokens // sum(scheduler.get_request_counts()))
    return threshold


def _tokens_ahead(scheduler: Scheduler) -> int:
    """Tokens that vLLM gives to requests without drafts ahead of the last one that has drafts.

    vLLM serves running requests in their order. A prefill takes what it needs, at most
    `_most_of_a_prefill`.
    """
    running = scheduler.running
    last = max(i for i, request in enumerate(running) if request.spec_token_ids)
    threshold = _most_of_a_prefill(scheduler)
    tokens = 0
    for request in running[:last]:
        if request.spec_token_ids:
            continue
        known = request.num_tokens_with_spec + request.num_output_placeholders
        needed = known - request.num_computed_tokens
        tokens += min(needed, threshold) if threshold > 0 else needed
    return tokens


def fit_step(scheduler: Scheduler, tokens: StepTokens, budgets: Iterable[int]) -> int | None:
    """Cut the drafts of running requests so that a step has rows for all of them.

    While other requests wait for a prefill, or are in one, drafts take no more than half of the
    step's tokens, so that the prefill goes on. The root of every request always fits first.

    Args:
        scheduler: vLLM's, about to schedule a step. `spec_token_ids` of its running requests are
            shortened in place.
        tokens: of a step.
        budgets: those with CUDA graphs. One of them is taken if any is small enough.

    Returns:
        Nodes that each request keeps at most; None if nothing had to be cut.

    """
    running = scheduler.running
    drafting = [request for request in running if request.spec_token_ids]
    if not drafting:
        return None
    rows = tokens.for_rows(len(running))
    admits = scheduler.waiting and len(running) < scheduler.max_num_running_reqs
    if len(drafting) < len(running) or admits:
        # Of the other half a prefill takes what it needs; plain decodes need one row each.
        left = rows - _tokens_ahead(scheduler)
        rows = max(min(rows // 2, left), len(drafting))
    rows = min(rows, tokens.tree_rows)
    longest = max(len(request.spec_token_ids) for request in drafting)
    if sum(1 + len(request.spec_token_ids) for request in drafting) <= rows:
        return None
    most = max(0, rows // len(drafting) - 1)
    nodes = largest_fitting(budgets, most) or most
    if nodes >= longest:
        return None
    for request in drafting:
        request.spec_token_ids = request.spec_token_ids[:nodes]
    return nodes


def attach(engine_core: EngineCore) -> None:
    """Let every step of an engine's scheduler begin with `fit_step`. The first cut is logged."""
    scheduler, config = engine_core.scheduler, engine_core.vllm_config
    spec = config.speculative_config
    schedule = spec.num_speculative_tokens_per_batch_size or [(1, 1, spec.budget)]
    budgets = TIERS if spec.auto_budget else sorted({nodes for _, _, nodes in schedule})
    tokens = StepTokens.of(config)
    nodes: int | None = None
    said = False

    def fit() -> None:
        nonlocal nodes, said
        nodes = fit_step(scheduler, tokens, budgets)
        if nodes is not None and not said:
            said = True
            logger.info(
                "ddtree: a step of %d tokens does not hold the trees of all %d running requests; "
                "they are cut to %d nodes (said once; a larger --max-num-batched-tokens avoids it)",
                min(tokens.scheduled, tokens.tree_rows),
                len(scheduler.running),
                nodes,
            )

    steps = integration.follow(scheduler)
    steps.scheduling.append(fit)
    steps.scheduled.append(lambda output: note_cut(output, nodes))
