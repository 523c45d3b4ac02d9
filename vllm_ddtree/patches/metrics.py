# SPDX-License-Identifier: Apache-2.0
"""The loggers of a front-end."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_ddtree.presence import is_ddtree

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.spec_decode.metrics import SpecDecodingProm


def manager_init(original: Callable[..., None]) -> Callable[..., None]:
    """`StatLoggerManager.__init__`."""

    def init(self: StatLoggerManager, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        spec = vllm_config.speculative_config
        if is_ddtree(spec):
            from vllm_ddtree.metrics.frontend import TreeMetrics

            self.ddtree_metrics = TreeMetrics(self.stat_loggers, spec)

    return init


def manager_record(original: Callable[..., None]) -> Callable[..., None]:
    """`StatLoggerManager.record`."""

    def record(
        self: StatLoggerManager,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        if (metrics := getattr(self, "ddtree_metrics", None)) is not None:
            metrics.record(scheduler_stats, engine_idx)
        original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    return record


def prom_init(original: Callable[..., None]) -> Callable[..., None]:
    """`SpecDecodingProm.__init__`."""

    def init(self: SpecDecodingProm, speculative_config: Any, *args: Any, **kwargs: Any) -> None:
        if is_ddtree(speculative_config):
            from vllm_ddtree.metrics.frontend import max_depth

            # A counter for every position that can be accepted, not for every node.
            depth = max_depth(speculative_config)
            speculative_config = SimpleNamespace(num_speculative_tokens=depth)
        original(self, speculative_config, *args, **kwargs)

    return init
