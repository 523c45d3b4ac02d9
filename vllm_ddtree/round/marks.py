# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers with a step: an attribute of vLLM's SchedulerOutput."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_CHAINS = "ddtree_chains"
_CUT = "ddtree_cut"
_NARROW = "ddtree_narrow"
_TRIED = "ddtree_tried"
_PLAIN = "ddtree_plain"
_SHARED = "ddtree_shared"


def ask_for_chains(scheduler_output: SchedulerOutput, chains: bool) -> None:
    """Say whether a step, all of whose requests verify trees of one size, verifies chains."""
    setattr(scheduler_output, _CHAINS, chains)


def asks_for_chains(scheduler_output: SchedulerOutput) -> bool:
    """Whether a step is to verify chains."""
    return getattr(scheduler_output, _CHAINS, False)


def ask_for_narrow(scheduler_output: SchedulerOutput, narrow: bool) -> None:
    """Say whether a step drafts with few masks."""
    setattr(scheduler_output, _NARROW, narrow)


def asks_for_narrow(scheduler_output: SchedulerOutput) -> bool:
    """Whether a step is to draft with few masks."""
    return getattr(scheduler_output, _NARROW, False)


def note_choice(scheduler_output: SchedulerOutput, tried: bool, plain: bool) -> None:
    """Say whether what a step drafts is tried, and whether it is nothing because that is faster."""
    setattr(scheduler_output, _TRIED, tried)
    setattr(scheduler_output, _PLAIN, plain)


def is_tried(scheduler_output: SchedulerOutput) -> bool:
    """Whether a step drafts another budget than the best known one, to learn what it gives."""
    return getattr(scheduler_output, _TRIED, False)


def plain_is_faster(scheduler_output: SchedulerOutput) -> bool:
    """Whether a step drafts nothing because plain decoding is faster."""
    return getattr(scheduler_output, _PLAIN, False)


def note_cut(scheduler_output: SchedulerOutput, nodes: int | None) -> None:
    """Say to how many nodes a step's trees were cut so that all requests fit; None: not cut."""
    setattr(scheduler_output, _CUT, nodes)


def was_fitted(scheduler_output: SchedulerOutput) -> bool:
    """Whether a step has passed `note_cut`: a scheduler made it, not vLLM's warm-up."""
    return hasattr(scheduler_output, _CUT)


def cut_to(scheduler_output: SchedulerOutput) -> int | None:
    """To how many nodes a step's trees were cut; None: they were not."""
    return getattr(scheduler_output, _CUT, None)


def share(scheduler_output: SchedulerOutput, nodes: int) -> None:
    """Say that the requests of a step, all of which have drafts, share so many nodes."""
    setattr(scheduler_output, _SHARED, nodes)


def shared_nodes(scheduler_output: SchedulerOutput) -> int | None:
    """Nodes that the requests of a step share; None: each verifies what it has."""
    return getattr(scheduler_output, _SHARED, None)
