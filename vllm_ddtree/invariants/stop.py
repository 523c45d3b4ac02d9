# SPDX-License-Identifier: Apache-2.0
"""Stops the requests for which an invariant does not hold, and them alone.

A worker puts what is broken on the step's output. Before the scheduler takes the output in, it
finishes those requests with an error. Their tokens of the step are dropped; their blocks are freed,
and the prefix cache forgets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from vllm_ddtree import integration, invariants

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger("vllm.ddtree")

Broken = dict[str, str]
"""Request id -> the invariant and the values."""
_ATTRIBUTE = "ddtree_broken"


def _gather(value: Any) -> list[Any]:
    """What every rank gives, by rank. All ranks must call it at the same time."""
    group = get_tp_group()
    if group.world_size == 1:
        return [value]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def enabled_on_all_ranks() -> bool:
    """`invariants.enabled`, on which the ranks agree. Called once, while an engine starts.

    Raises:
        ValueError: some ranks' environments ask for the checks and others do not. They would wait
            for each other in the first step.

    """
    ranks = _gather(invariants.enabled())
    if len(set(ranks)) > 1:
        without = [rank for rank, enabled in enumerate(ranks) if not enabled]
        raise ValueError(
            f"VLLM_DDTREE_CHECK=1 is not set for ranks {without}: set it for all ranks, or for none"
        )
    return ranks[0]


def of_all_ranks(broken: Broken) -> Broken:
    """What any rank found; only the first rank answers the scheduler."""
    parts: list[Broken] = _gather(broken)
    return {name: message for part in reversed(parts) for name, message in part.items()}


def put(model_state: Any, output: Any) -> None:
    """Put what a step's checks found on its output.

    Args:
        model_state: a DDTreeModelState, after the step.
        output: what vLLM's `GPUModelRunner.sample_tokens` returns.

    """
    if broken := model_state.take_broken():
        setattr(integration.model_runner_output(output), _ATTRIBUTE, broken)


def observer(scheduler: Scheduler) -> integration.Observer:
    """An observer that stops the requests that a step's output names, and tells their clients."""

    def stop(
        _: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Callable[[dict[int, EngineCoreOutputs]], None]:
        broken: Broken = getattr(model_runner_output, _ATTRIBUTE, {})
        stopped = integration.stop_with_error(scheduler, broken)

        def tell(outputs: dict[int, EngineCoreOutputs]) -> None:
            for request in stopped:
                message = f"ddtree invariant broken: {broken[request.request_id]}"
                logger.error("Request %s is stopped: %s", request.request_id, message)
                integration.add_error_output(outputs, request, message)

        return tell

    return stop
