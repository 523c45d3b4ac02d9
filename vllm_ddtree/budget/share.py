# SPDX-License-Identifier: Apache-2.0
"""Which steps share their nodes, and how many (`mean_budget`).

A tree has room for `budget` nodes, and a step for `mean_budget` nodes a request on average. A step
of trees alone shares them: the device gives each request as many as its nodes are worth. In all
other steps the host must know every request's rows, so each tree is cut to the mean: beside
prefills, with grammars, with logprobs, and where a request is alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_ddtree import integration
from vllm_ddtree.round.marks import cut_to, note_cut, share

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request


class Sharing:
    """Cuts and marks the steps of a scheduler.

    Args:
        scheduler: vLLM's.
        mean: nodes of a request, on average.
        most_rows: rows that are sampled in one piece.

    """

    def __init__(self, scheduler: Scheduler, mean: int, most_rows: int) -> None:
        self._scheduler, self._mean, self._most_rows = scheduler, mean, most_rows
        self._cut = False
        self._running: set[str] = set()

    def scheduling(self) -> None:
        """A step is about to be scheduled: cut its trees if it cannot share."""
        running = self._scheduler.running
        self._running = {request.request_id for request in running}
        admits = self._scheduler.waiting and len(running) < self._scheduler.max_num_running_reqs
        self._cut = bool(admits) or not all(map(_may_share, running)) or len(running) < 2
        if self._cut:
            for request in running:
                request.spec_token_ids = request.spec_token_ids[: self._mean]

    def scheduled(self, scheduler_output: SchedulerOutput) -> None:
        """A step is about to run: mark it if it shares."""
        lengths = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if self._cut and drafts:
            cut = cut_to(scheduler_output)
            note_cut(scheduler_output, self._mean if cut is None else min(cut, self._mean))
        if self._cut or len(drafts) < len(lengths) or len(lengths) < 2:
            return
        if not self._running.issuperset(lengths):
            return  # one has joined that nobody looked at
        if any(length != 1 + len(drafts[name]) for name, length in lengths.items()):
            return
        room = sum(map(len, drafts.values()))
        nodes = min(self._mean * len(lengths), self._most_rows - len(lengths))
        if 0 <= nodes < room:
            share(scheduler_output, nodes)


def _may_share(request: Request) -> bool:
    """Whether a request has a draft, and the host need not know how much of it is verified."""
    params = request.sampling_params
    return bool(
        request.spec_token_ids
        and params is not None
        and params.structured_outputs is None
        and params.logprobs is None
        and not params.logprob_token_ids
    )


def attach(engine_core: EngineCore) -> None:
    """Let the steps of an engine share, if it is configured so."""
    config = engine_core.vllm_config
    mean = config.speculative_config.mean_budget
    if mean is not None:
        most_rows = get_max_chunk_logits(config.model_config.get_vocab_size())
        sharing = Sharing(engine_core.scheduler, mean, most_rows)
        steps = integration.follow(engine_core.scheduler)
        steps.scheduling.append(sharing.scheduling)
        steps.scheduled.append(sharing.scheduled)
