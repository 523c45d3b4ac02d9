# SPDX-License-Identifier: Apache-2.0
"""Verify graphs in a second form: chains, by the attention backend's own causal attention.

A graph has its attention captured in it, so a batch that may be verified as trees and as chains has
a graph for each. The scheduler says with each step which form it wants.
"""

from collections.abc import Callable
from typing import Any

from vllm_ddtree import integration
from vllm_ddtree.round.runtime import Runtime

_ASKED = "ddtree_chains"


def ask_for_chains(scheduler_output: Any, chain: bool) -> None:
    """Mark a step, whose requests all verify trees of the same size, to be verified as chains."""
    setattr(scheduler_output, _ASKED, chain)


def asks_for_chains(scheduler_output: Any) -> bool:
    """Whether a step is marked so."""
    return getattr(scheduler_output, _ASKED, False)


class GraphsByForm(dict[Any, Any]):
    """vLLM's graphs by descriptor (`CudaGraphManager.graphs`), and the chains' beside them.

    Args:
        trees: the graphs of trees and of everything else.
        chains: graphs of some of the same descriptors.
        runtime: whose step in progress says which is replayed.

    """

    def __init__(self, trees: dict[Any, Any], chains: dict[Any, Any], runtime: Runtime) -> None:
        super().__init__(trees)
        self.chains = chains
        self._runtime = runtime

    def __getitem__(self, desc: Any) -> Any:
        if self._runtime.step.as_chains:
            return self.chains[desc]
        return super().__getitem__(desc)


def capture_chains(
    manager: Any, runtime: Runtime, budget: int, capture: Callable[[], None]
) -> None:
    """Capture the verify graphs of a budget once more, as chains.

    Args:
        manager: vLLM's CudaGraphManager of the target, its graphs captured.
        runtime: of the engine.
        budget: nodes of the chain.
        capture: captures every graph that the manager describes.

    """
    full = integration.full_graphs(manager)
    wanted = [desc for desc in full if desc.uniform_token_count == budget + 1]
    if not wanted:
        return
    if integration.estimates_memory(manager):
        full.extend(wanted)
        return
    runtime.chains_asked = True
    try:
        chains = integration.capture_apart(manager, wanted, capture)
    finally:
        runtime.chains_asked = False
    manager.graphs = GraphsByForm(manager.graphs, chains, runtime)
