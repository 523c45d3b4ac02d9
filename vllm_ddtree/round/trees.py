# SPDX-License-Identifier: Apache-2.0
"""The trees in device memory, one per request slot, at fixed addresses."""

import torch

# The builder packs row (8 bits), depth (5) and rank (6) into one 32-bit key.
MAX_BUDGET = 255
MAX_DEPTH = 31


def words(budget: int) -> int:
    """Number of 32-bit words in one row's ancestor bitmask: ceil((budget + 1) / 32)."""
    return (budget + 32) // 32


class TreeBuffers:
    """Persistent trees by slot (vLLM's request-state index), written in place.

    With S = max_num_reqs, N = budget + 1 rows a tree (row 0 = root) and W = words(budget):

    tokens:    int32 [S, N], token of each node (row 0 and unused rows: 0)
    parents:   int32 [S, N], row of the parent (root and unused rows: -1)
    depths:    int32 [S, N], distance from the root (root: 0; unused rows: 1)
    masks:     int32 [S, N, W], bit b of word w is set when row 32 * w + b is the row itself or one
               of its ancestors (unused rows: the root and the row itself)
    num_nodes: int32 [S], valid nodes, 0..budget; rows num_nodes + 1 .. budget are unused
    chain:     int32 [S], 1 to build only the spine; read by the builder, written by whoever sets
               the policy
    intervals: int32 [S, 2, N], the builder's scratch
    spines:    int32 [S, 31], the most probable token of each depth, as far as the drafter goes
    claims:    int32 [S, 2, N], path probability times 2^20 of each row of the tree, and of each
               depth of the spine; 0 for what is not there

    Every slot starts as the empty tree. Raises ValueError for a budget outside 1..255 or no request
    slots.
    """

    def __init__(self, max_num_reqs: int, budget: int, device: torch.device | str) -> None:
        if not 1 <= budget <= MAX_BUDGET:
            raise ValueError(f"budget must be between 1 and {MAX_BUDGET} nodes, got {budget}")
        if max_num_reqs < 1:
            raise ValueError(f"max_num_reqs must be at least 1, got {max_num_reqs}")
        self.max_num_reqs = max_num_reqs
        self.budget = budget
        self.num_rows = num_rows = budget + 1
        self.num_words = words(budget)
        self.device = torch.device(device)

        def full(value: int, *shape: int) -> torch.Tensor:
            return torch.full((max_num_reqs, *shape), value, dtype=torch.int32, device=device)

        self.tokens = full(0, num_rows)
        self.parents = full(-1, num_rows)
        self.depths = full(1, num_rows)
        self.depths[:, 0] = 0
        self.masks = full(0, num_rows, self.num_words)
        self.masks.copy_(_empty_masks(budget))
        self.num_nodes = full(0)
        self.chain = full(0)
        self.intervals = full(0, 2, num_rows)
        self.spines = full(0, MAX_DEPTH)
        self.claims = full(0, 2, num_rows)


def _empty_masks(budget: int) -> torch.Tensor:
    """Bitmasks of the empty tree, int32 [N, W]: every row sees the root and itself."""
    rows = torch.arange(budget + 1)
    masks = torch.zeros(budget + 1, words(budget), dtype=torch.int64)
    masks[:, 0] = 1
    masks[rows, rows // 32] |= 1 << (rows % 32)
    return masks.to(torch.int32)  # bit 31 wraps into the sign
