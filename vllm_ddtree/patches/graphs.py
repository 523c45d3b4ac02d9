# SPDX-License-Identifier: Apache-2.0
"""Which graphs a runner captures, and on which stream."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm_ddtree.graphs.capture_scope import CaptureScope
from vllm_ddtree.presence import is_ddtree

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

_scope = CaptureScope()
_auto_budget: ContextVar[bool] = ContextVar("auto_budget", default=False)
"""Whether the graph manager that is looking for its candidates serves an auto budget."""


def graph_capture(original: Callable[..., Any]) -> Callable[..., Any]:
    """`graph_capture`, within a runner's scope."""
    return _scope.graph_capture(original)


def capture_model(original: Callable[..., int]) -> Callable[..., int]:
    """`GPUModelRunner.capture_model`.

    With several ranks vLLM's context also registers the buffers of its all-reduce when it ends.
    Here that happens once, for the graphs of all managers. No graph is replayed before.
    """

    def wanted(config: VllmConfig) -> bool:
        return is_ddtree(config.speculative_config)

    return _scope.capture_model(original, wanted)


def init_candidates(original: Callable[..., None]) -> Callable[..., None]:
    """`CudaGraphManager._init_candidates`."""

    def init(self: CudaGraphManager) -> None:
        spec = self.vllm_config.speculative_config
        token = _auto_budget.set(is_ddtree(spec) and spec.auto_budget)
        try:
            original(self)
        finally:
            _auto_budget.reset(token)

    return init


def schedule_lookup(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """`build_dynamic_sd_schedule_lookup`, by which a manager knows its budgets.

    An auto budget's schedule is where it starts from, not all that it may choose.
    """

    def lookup(*args: Any, **kwargs: Any) -> list[int]:
        if not _auto_budget.get():
            return original(*args, **kwargs)
        from vllm_ddtree.budget.tiers import TIERS

        return [0, *TIERS]  # by running requests, of which there are none at first

    return lookup


def capture(original: Callable[..., None]) -> Callable[..., None]:
    """`ModelCudaGraphManager.capture`."""

    def capture_all(
        self: ModelCudaGraphManager, model: Any, model_state: Any, *args: Any, **kwargs: Any
    ) -> None:
        def again() -> None:
            original(self, model, model_state, *args, **kwargs)

        again()
        spec = self.vllm_config.speculative_config
        if is_ddtree(spec) and spec.auto_budget and model_state.chains_allowed:
            from vllm_ddtree.budget.tiers import chain_budget
            from vllm_ddtree.graphs.chains import capture_chains

            runtime = model_state.runtime
            if (budget := chain_budget(runtime.max_depth)) is not None:
                capture_chains(self, runtime, budget, again)

    return capture_all
