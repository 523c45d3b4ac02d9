# SPDX-License-Identifier: Apache-2.0
"""A worker: its sleep, and the output of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ddtree.presence import is_ddtree

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu_worker import Worker


def sleep(original: Callable[..., None]) -> Callable[..., None]:
    """`Worker.sleep`."""

    def fall_asleep(self: Worker, level: int = 1) -> None:
        if is_ddtree(self.vllm_config.speculative_config):
            from vllm_ddtree.workarounds import sleep

            sleep.keep(self, level)
        original(self, level)

    return fall_asleep


def wake_up(original: Callable[..., None]) -> Callable[..., None]:
    """`Worker.wake_up`."""

    def awake(self: Worker, tags: list[str] | None = None) -> None:
        original(self, tags)
        if is_ddtree(self.vllm_config.speculative_config):
            from vllm_ddtree.workarounds import sleep

            sleep.restore(self, tags)

    return awake


def get_output(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`AsyncOutput.get_output`; the output itself says whether a tree sampler made it."""

    def get(self: AsyncOutput) -> ModelRunnerOutput:
        from vllm_ddtree.round.emitted import with_facts

        return with_facts(original, self)

    return get
