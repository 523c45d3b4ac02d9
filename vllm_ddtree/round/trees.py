# SPDX-License-Identifier: Apache-2.0
"""The trees in device memory, one per request, at fixed addresses."""

from __future__ import annotations

import torch

# The builder packs row (8 bits), depth (5) and rank (6) into one 32-bit key.
MAX_BUDGET = 255
MAX_DEPTH = 31


def words(budget: int) -> int:
    """Number of 32-bit words in one row's ancestor bitmask: ceil((budget + 1) / 32)."""
    return (budget + 32) // 32


class TreeBuffers:
    """Persistent trees by index (vLLM's request-state index), written in place.

    S = max_num_reqs, W = words(budget), and a tree has N = budget + 1 rows, of which row 0 is the
    root. All trees are empty at first.

    Args:
        max_num_reqs: most requests.
        budget: most nodes of a tree, 1 to 255.
        device: where the trees are.

    Raises:
        ValueError: the budget is outside 1 to 255, or there is no request.

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
        """int32 [S, N], token of each node; 0 for the root and unused rows."""
        self.parents = full(-1, num_rows)
        """int32 [S, N], row of the parent; -1 for the root and unused rows."""
        self.depths = full(1, num_rows)
        """int32 [S, N], distance from the root; 1 for unused rows."""
        self.depths[:, 0] = 0
        self.masks = full(0, num_rows, self.num_words)
        """int32 [S, N, W], bit b of word w is set when row 32 * w + b is the row itself or one of
        its ancestors. An unused row has the bits of the root and of itself."""
        self.masks.copy_(_empty_masks(budget))
        self.num_nodes = full(0)
        """int32 [S], nodes of the tree, 0 to budget; the rows behind them are unused."""
        self.chain_only = full(0)
        """int32 [S], 1 for a request that verifies its chain alone: its tree is built without
        siblings. The builder reads it, the model state writes it."""
        self.chains = full(0, MAX_DEPTH)
        """int32 [S, 31], the drafter's most probable token at each depth, as far as it drafted."""
        self.claims = full(0, 2, num_rows)
        """int32 [S, 2, N], path probability times 2^20 of each row of the tree, then of each depth
        of the chain; 0 for what is not there."""
        self.intervals = full(0, 2, num_rows)
        """int32 [S, 2, N], scratch of the builder."""


def _empty_masks(budget: int) -> torch.Tensor:
    """Bitmasks of the empty tree, int32 [N, W]: every row sees the root and itself."""
    rows = torch.arange(budget + 1)
    masks = torch.zeros(budget + 1, words(budget), dtype=torch.int64)
    masks[:, 0] = 1
    masks[rows, rows // 32] |= 1 << (rows % 32)
    return masks.to(torch.int32)  # bit 31 wraps into the sign
