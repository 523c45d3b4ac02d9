# SPDX-License-Identifier: Apache-2.0
"""The steps of a scheduler: they act on one that carries DDTree's `Steps`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ddtree import integration

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput


def schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Scheduler.schedule`."""

    def schedule_step(self: Scheduler, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if (steps := integration.steps_of(self)) is None:
            return original(self, *args, **kwargs)
        for prepare in steps.scheduling:
            prepare()
        output = original(self, *args, **kwargs)
        for see in steps.scheduled:
            see(output)
        return output

    return schedule_step


def update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Scheduler.update_from_output`."""

    def update(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if (steps := integration.steps_of(self)) is None:
            return original(self, scheduler_output, model_runner_output)
        later = [observe(scheduler_output, model_runner_output) for observe in steps.observers]
        outputs = original(self, scheduler_output, model_runner_output)
        for call in later:
            if call is not None:
                call(outputs)
        return outputs

    return update


def make_spec_decoding_stats(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Scheduler.make_spec_decoding_stats`, which vLLM calls for every draft that it counts."""

    def make(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        if (steps := integration.steps_of(self)) is not None:
            for see in steps.drafted:
                see(kwargs["request_id"], kwargs["num_accepted_tokens"])
        return original(self, *args, **kwargs)

    return make


def make_stats(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Scheduler.make_stats`, which vLLM calls at the end of every step."""

    def make(self: Scheduler, spec_decoding_stats: Any = None, *args: Any, **kwargs: Any) -> Any:
        if (steps := integration.steps_of(self)) is not None:
            for complete in steps.counted:
                spec_decoding_stats = complete(spec_decoding_stats)
        return original(self, spec_decoding_stats, *args, **kwargs)

    return make
