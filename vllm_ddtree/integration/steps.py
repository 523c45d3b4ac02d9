# SPDX-License-Identifier: Apache-2.0
"""What sees a step's output before the scheduler takes it in."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Observer: TypeAlias = Callable[[Any, Any], Callable[[dict[int, Any]], None] | None]
"""(SchedulerOutput, ModelRunnerOutput) -> None, or what is to be called with what the scheduler
makes of them: `EngineCoreOutputs` by client."""


def observe_steps(scheduler: Any, observers: Iterable[Observer]) -> None:
    """Call `observers`, in their order, with every step of a scheduler."""
    update, observers = scheduler.update_from_output, list(observers)

    def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
        later = [observe(scheduler_output, model_runner_output) for observe in observers]
        outputs = update(scheduler_output, model_runner_output)
        for call in later:
            if call is not None:
                call(outputs)
        return outputs

    scheduler.update_from_output = update_from_output
