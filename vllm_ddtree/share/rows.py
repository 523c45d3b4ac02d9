# SPDX-License-Identifier: Apache-2.0
"""The rows of a step whose requests share its nodes, while vLLM prepares the step's batch.

The scheduler gives every request room for its whole tree. vLLM's model runner then asks an
`AdaptiveVerificationManager` (v1/worker/gpu/spec_decode/adaptive_verification.py) how many tokens
the step really has, which the host must know, and for the first row of each request, which only the
device knows. `SharedRows` answers in its place for one step at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ddtree import integration
from vllm_ddtree.share.calibration import Calibration
from vllm_ddtree.share.nodes import Shares

if TYPE_CHECKING:
    from vllm_ddtree.round.paths import Paths
    from vllm_ddtree.round.trees import TreeBuffers


class SharedRows:
    """Trees of a batch, cut where the nodes are worth least.

    Args:
        trees: of the engine.

    """

    def __init__(self, trees: TreeBuffers) -> None:
        self.calibration = Calibration(trees.device)
        self._trees = trees
        self._shares = Shares(trees.max_num_reqs, trees.budget, trees.device)
        self._nodes = 0
        self._capacities = np.zeros(0, dtype=np.int32)

    def compile(self, paths: Paths) -> None:
        """Compile the kernels, on a request without nodes.

        Args:
            paths: of the engine.

        """
        zeros = torch.zeros(1, dtype=torch.int32, device=self._trees.device)
        self.calibration.observe(self._trees, zeros.long(), zeros, paths)
        self.calibration.refresh()
        self._shares.assign(self._trees, self.calibration.worth, zeros.long(), zeros, 0)

    def of_step(self, nodes: int) -> SharedRows:
        """For the step that begins, whose requests share so many nodes."""
        self._nodes = nodes
        return self

    def add_request(self, req_idx: int) -> None:
        """Nothing is kept of a request."""

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Rows of the step."""
        return len(num_tokens_per_req) + self._nodes

    def compact_batch(
        self,
        num_draft_tokens_per_req: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        cu_num_logits_np: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the host takes for the shares: equal ones, as many rows in all.

        Args:
            num_draft_tokens_per_req: int32 [num_reqs], most nodes of each request.
            num_scheduled_tokens: int32 [num_reqs], one more of each.
            cu_num_logits_np: int32 [num_reqs + 1], their running sum.

        Returns:
            int32 [num_reqs] and int32 [num_reqs + 1].

        """
        self._capacities = num_draft_tokens_per_req
        num_reqs = len(num_scheduled_tokens)
        rows = np.full(num_reqs, 1 + self._nodes // num_reqs, dtype=np.int32)
        rows[: self._nodes % num_reqs] += 1
        starts = np.zeros_like(cu_num_logits_np)
        np.cumsum(rows, out=starts[1:])
        return rows, starts

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple:
        """The shares, on the device.

        Args:
            req_ids: of the step.
            idx_mapping: int64 [num_reqs], index of each request.

        Returns:
            int32 [num_reqs + 1], running sum of the requests' logits; int32 [max_num_reqs + 1],
            first row of each; nodes; and what else this vLLM expects.

        """
        capacities = async_tensor_h2d(self._capacities, device=idx_mapping.device)
        self.calibration.refresh()
        self._shares.assign(
            self._trees, self.calibration.worth, idx_mapping, capacities, self._nodes
        )
        # Every row is a tree's, so a request has as many logits as rows.
        starts = self._shares.starts
        return integration.reallocated(starts[: len(req_ids) + 1], starts, self._nodes)
