# SPDX-License-Identifier: Apache-2.0
"""An engine core that is about to serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ddtree import integration
from vllm_ddtree.presence import is_ddtree

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def init(original: Callable[..., None]) -> Callable[..., None]:
    """`EngineCore.__init__`."""

    def make(self: EngineCore, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if is_ddtree(vllm_config.speculative_config):
            _follow_steps(self)

    return make


def _follow_steps(engine_core: EngineCore) -> None:
    """Let checks, budgets and metrics follow the steps of its scheduler, in this order."""
    from vllm_ddtree import invariants
    from vllm_ddtree.budget import auto, cost, fit, share
    from vllm_ddtree.invariants import stop
    from vllm_ddtree.metrics import scheduler as metrics
    from vllm_ddtree.workarounds.prompt_logprobs import drop_padded

    observers: list[integration.Observer | None] = []
    if invariants.enabled():
        observers.append(stop.observer(engine_core.scheduler))
    if engine_core.vllm_config.speculative_config.auto_budget:
        costs = engine_core.model_executor.collective_rpc(cost.measure)[0]
        observers.append(auto.attach(engine_core, costs))
    fit.attach(engine_core)
    share.attach(engine_core)
    observers += [metrics.attach(engine_core), drop_padded]
    integration.observe_steps(engine_core.scheduler, filter(None, observers))
