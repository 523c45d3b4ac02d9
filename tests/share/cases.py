# SPDX-License-Identifier: Apache-2.0
"""Random trees of batches, with claims that fall along the order of the tree, or do not."""

from __future__ import annotations

import numpy as np
import torch

from vllm_ddtree.round.meter import ONE
from vllm_ddtree.round.trees import TreeBuffers


def random_trees(
    rng: np.random.Generator, num_reqs: int, budget: int, device: str, levels: int = ONE
) -> tuple[TreeBuffers, torch.Tensor]:
    """Trees at scattered indices, some with fewer nodes than the budget.

    Args:
        rng: of the trees.
        num_reqs: trees.
        budget: most nodes of each.
        device: of the trees.
        levels: different claims; few make many ties.

    Returns:
        The trees, and int64 [num_reqs], their indices.

    """
    trees = TreeBuffers(num_reqs + 3, budget, device)
    indices = torch.from_numpy(rng.permutation(num_reqs + 3)[:num_reqs].copy())
    for index in indices.tolist():
        nodes = int(rng.integers(max(1, budget // 2), budget + 1))
        parents = [-1, *(int(rng.integers(0, row)) for row in range(1, nodes + 1))]
        depths = [0]
        for parent in parents[1:]:
            depths.append(min(31, depths[parent] + 1))
        claims = np.sort(rng.integers(1, levels + 1, nodes))[::-1] * (ONE // levels)
        trees.parents[index, : nodes + 1] = torch.tensor(parents, dtype=torch.int32)
        trees.depths[index, : nodes + 1] = torch.tensor(depths, dtype=torch.int32)
        trees.claims[index, 0, 0] = ONE
        trees.claims[index, 0, 1 : nodes + 1] = torch.from_numpy(claims.astype(np.int32))
        trees.num_nodes[index] = nodes
    return trees, indices.to(device)
