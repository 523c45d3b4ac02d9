# SPDX-License-Identifier: Apache-2.0
"""One word for all ranks that run the same steps.

vLLM's rule is that all ranks schedule alike. Most executors have one scheduler, so whatever it
chooses by a clock or a meter holds for every rank. Under `external_launcher` (torchrun) every rank
has a scheduler of its own, with a clock of its own. There the first rank's numbers count, and the
others take them over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from vllm.distributed import get_tp_group
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

if TYPE_CHECKING:
    from vllm.v1.executor import Executor

T = TypeVar("T")
Agree = Callable[[T], T]
"""(what this rank thinks) -> what all ranks take. All ranks must call it at the same step. It waits
for the first rank, and gives a copy."""


def agreement(executor: Executor) -> Agree | None:
    """How the ranks of an engine agree on what clocks and meters show.

    Args:
        executor: vLLM's, its workers ready.

    Returns:
        None where one scheduler chooses for all ranks, so that there is nothing to agree on.

    """
    if not isinstance(executor, ExecutorWithExternalLauncher):
        return None
    group = get_tp_group()
    if group.world_size == 1:
        return None

    def agree(value: T) -> T:
        return group.broadcast_object(value, src=0)

    return agree
