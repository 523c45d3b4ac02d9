# SPDX-License-Identifier: Apache-2.0
"""A second set of verify graphs, in which steps of trees are verified as chains.

A CUDA graph has its attention captured in it: the tree kernels, or the backend's own causal
attention for chains. So a batch that may be verified in either form has a graph for each. The
scheduler says with each step which form it wants (round/marks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ddtree import integration

if TYPE_CHECKING:
    from torch.cuda import CUDAGraph
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

    from vllm_ddtree.round.runtime import Runtime


class GraphsByForm(dict["BatchExecutionDescriptor", "CUDAGraph"]):
    """vLLM's graphs by descriptor (`CudaGraphManager.graphs`), and the chains' graphs beside them.

    Args:
        trees: graphs of trees and of everything else.
        chains: graphs of chains, for some of the same descriptors.
        runtime: the engine's; its step in progress says which form is replayed.

    """

    def __init__(
        self,
        trees: dict[BatchExecutionDescriptor, CUDAGraph],
        chains: dict[BatchExecutionDescriptor, CUDAGraph],
        runtime: Runtime,
    ) -> None:
        super().__init__(trees)
        self.chains = chains
        self._runtime = runtime

    def __getitem__(self, desc: BatchExecutionDescriptor) -> CUDAGraph:
        if self._runtime.step.as_chains:
            return self.chains[desc]
        return super().__getitem__(desc)


def capture_chains(
    manager: ModelCudaGraphManager, runtime: Runtime, budget: int, capture: Callable[[], None]
) -> None:
    """Capture the verify graphs of a budget once more, as chains.

    Args:
        manager: vLLM's graphs of the target, captured.
        runtime: the engine's.
        budget: nodes of the chain.
        capture: captures every graph that the manager describes.

    """
    full = integration.full_graphs(manager)
    wanted = [desc for desc in full if desc.uniform_token_count == budget + 1]
    if not wanted:
        return
    if integration.estimates_memory(manager):
        # Nothing is replayed: the second set only has to be counted.
        full.extend(wanted)
        return
    runtime.chains_asked = True
    try:
        chains = integration.capture_apart(manager, wanted, capture)
    finally:
        runtime.chains_asked = False
    manager.graphs = GraphsByForm(manager.graphs, chains, runtime)
