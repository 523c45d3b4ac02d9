# SPDX-License-Identifier: Apache-2.0
"""What follows the steps of a scheduler: one attribute of it, which the patches look for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Observer: TypeAlias = Callable[[Any, Any], Callable[[dict[int, Any]], None] | None]
"""(SchedulerOutput, ModelRunnerOutput) -> None, or what is to be called with what the scheduler
makes of them: `EngineCoreOutputs` by client."""

_ATTRIBUTE = "ddtree_steps"


@dataclass
class Steps:
    """Those who follow a scheduler's steps, each list in the order of the calls."""

    scheduling: list[Callable[[], None]] = field(default_factory=list)
    """Before the scheduler chooses what a step runs."""
    scheduled: list[Callable[[Any], None]] = field(default_factory=list)
    """(SchedulerOutput) of a step that is about to run."""
    observers: list[Observer] = field(default_factory=list)
    """Of a step's output, before the scheduler takes it in."""
    drafted: list[Callable[[str, int], None]] = field(default_factory=list)
    """(request id, accepted nodes) of a draft that the scheduler counts."""
    counted: list[Callable[[Any], Any]] = field(default_factory=list)
    """(SpecDecodingStats or None) of a step -> the same, complete."""


def steps_of(scheduler: Any) -> Steps | None:
    """Those who follow a scheduler; None: nobody, it is another method's."""
    return getattr(scheduler, _ATTRIBUTE, None)


def follow(scheduler: Any) -> Steps:
    """Those who follow a scheduler, to add to."""
    steps = steps_of(scheduler)
    if steps is None:
        steps = Steps()
        setattr(scheduler, _ATTRIBUTE, steps)
    return steps


def observe_steps(scheduler: Any, observers: Iterable[Observer]) -> None:
    """Call `observers`, in their order, with every step of a scheduler."""
    follow(scheduler).observers.extend(observers)
