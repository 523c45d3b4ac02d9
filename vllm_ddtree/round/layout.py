# SPDX-License-Identifier: Apache-2.0
"""Where the requests of a verify batch have their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch


@dataclass(frozen=True)
class Layout:
    """The requests of a verify batch on its one flat axis of rows.

    A request with n > 1 logits verifies a tree: the last n of its rows are the root and the tree's
    first n - 1 nodes. Its other rows, and all rows of other requests, belong to no tree.
    """

    indices: torch.Tensor
    """int64 [num_reqs], index of each request in the persistent buffers; -1 is a dummy without a
    tree."""
    query_start_loc: torch.Tensor
    """int32 [num_reqs + 1 or more], first row of each request; entry num_reqs is the end of all."""
    cu_num_logits: torch.Tensor
    """int32 [num_reqs + 1 or more], running sum of the requests' logits."""

    @classmethod
    def of(cls, batch: InputBatch) -> Layout:
        """The layout of vLLM's batch (v1/worker/gpu/input_batch.py)."""
        return cls(batch.idx_mapping, batch.query_start_loc, batch.cu_num_logits)

    @property
    def num_reqs(self) -> int:
        """Requests of the batch."""
        return self.indices.shape[0]

    def part(self, start: int, end: int, first_logit: int) -> Layout:
        """Requests `start` to `end` of the batch, the first of whose logits is `first_logit`."""
        cu_num_logits = self.cu_num_logits[start : end + 1]
        return Layout(
            self.indices[start:end],
            self.query_start_loc[start : end + 1],
            cu_num_logits - first_logit if start else cu_num_logits,
        )
