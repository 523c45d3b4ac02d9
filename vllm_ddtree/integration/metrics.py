# SPDX-License-Identifier: Apache-2.0
"""The way of statistics: from the runner by the scheduler to a front-end's loggers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm_ddtree.integration.replace import replace


def hook_outputs(with_facts: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Let what is known of a step leave the runner with its output.

    Args:
        with_facts: (vLLM's AsyncOutput.get_output, AsyncOutput) -> ModelRunnerOutput.

    """
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    def get_output(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def get(self: Any) -> Any:
            return with_facts(original, self)

        return get

    replace(AsyncOutput, "get_output", get_output)


def hook_metrics(
    is_ddtree: Callable[[Any], bool],
    make_metrics: Callable[[list[Any], Any], Any],
    max_depth: Callable[[Any], int],
) -> None:
    """Let a front-end's loggers see what is counted of the trees.

    Args:
        is_ddtree: whether a speculative config is DDTree's.
        make_metrics: (stat loggers, DDTreeConfig) -> an object whose `record(SchedulerStats, engine
            index)` is called before the loggers see the statistics.
        max_depth: DDTreeConfig -> the deepest node of a tree.

    """
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    def manager_init(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            spec = vllm_config.speculative_config
            if is_ddtree(spec):
                self.ddtree_metrics = make_metrics(self.stat_loggers, spec)

        return init

    def manager_record(original: Callable[..., None]) -> Callable[..., None]:
        def record(
            self: Any,
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
        def init(self: Any, speculative_config: Any, *args: Any, **kwargs: Any) -> None:
            if is_ddtree(speculative_config):
                # A counter for every position that can be accepted, not for every node.
                depth = max_depth(speculative_config)
                speculative_config = SimpleNamespace(num_speculative_tokens=depth)
            original(self, speculative_config, *args, **kwargs)

        return init

    replace(StatLoggerManager, "__init__", manager_init)
    replace(StatLoggerManager, "record", manager_record)
    replace(SpecDecodingProm, "__init__", prom_init)


def new_spec_decoding_stats(num_spec_tokens: int) -> Any:
    """vLLM's SpecDecodingStats of a step without any draft."""
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    return SpecDecodingStats.new(num_spec_tokens)
