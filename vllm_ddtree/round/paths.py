# SPDX-License-Identifier: Apache-2.0
"""The accepted paths of a verify step: what the walk found, and where its rows are."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Paths:
    """Persistent buffers of the accepted paths, written by the walk.

    A path begins at the root and ends at the last accepted node. P = max_depth + 1 is its greatest
    length.
    """

    rows: torch.Tensor
    """int32 [max_num_reqs, P], tree row of each path element, root first; by place in the batch."""
    lens: torch.Tensor
    """int32 [max_num_reqs], path elements, root included; by place in the batch."""
    gather_index: torch.Tensor
    """int64 [max_num_tokens], batch rows with each path at the front of its tree rows: entry j of a
    request's tree rows is the batch row of path element j. All other entries are their own index.
    """

    @classmethod
    def empty(
        cls, max_num_reqs: int, max_depth: int, max_num_tokens: int, device: torch.device | str
    ) -> Paths:
        """Buffers without paths.

        Args:
            max_num_reqs: most requests in a batch.
            max_depth: deepest node of a tree.
            max_num_tokens: most rows in a batch.
            device: where the buffers are.

        """
        return cls(
            rows=torch.zeros(max_num_reqs, max_depth + 1, dtype=torch.int32, device=device),
            lens=torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
            gather_index=torch.arange(max_num_tokens, dtype=torch.int64, device=device),
        )

    def part(self, start: int, end: int) -> Paths:
        """The paths of requests `start` to `end` of the batch."""
        return Paths(self.rows[start:end], self.lens[start:end], self.gather_index)

    def to_front(self, by_row: torch.Tensor) -> torch.Tensor:
        """A new tensor in which each path's entries come first among those of its request.

        Args:
            by_row: [num_tokens, ...], by row of the batch, after its walk.

        """
        return by_row[self.gather_index[: by_row.shape[0]]]
