# SPDX-License-Identifier: Apache-2.0
"""Where a worker goes to sleep and wakes up."""

from collections.abc import Callable
from typing import Any

from vllm_ddtree.integration.replace import replace


def hook_sleep(
    is_ddtree: Callable[[Any], bool],
    before: Callable[[Any, int], None],
    after: Callable[[Any, list[str] | None], None],
) -> None:
    """Let DDTree save before a worker sleeps and restore after it has woken up.

    Args:
        is_ddtree: whether a speculative config is DDTree's.
        before: (worker, level).
        after: (worker, tags of what is back; None: all).

    """
    from vllm.v1.worker.gpu_worker import Worker

    def sleep(original: Callable[..., None]) -> Callable[..., None]:
        def go(self: Any, level: int = 1) -> None:
            if is_ddtree(self.vllm_config.speculative_config):
                before(self, level)
            original(self, level)

        return go

    def wake_up(original: Callable[..., None]) -> Callable[..., None]:
        def come(self: Any, tags: list[str] | None = None) -> None:
            original(self, tags)
            if is_ddtree(self.vllm_config.speculative_config):
                after(self, tags)

        return come

    replace(Worker, "sleep", sleep)
    replace(Worker, "wake_up", wake_up)
