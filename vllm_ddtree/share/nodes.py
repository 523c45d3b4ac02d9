# SPDX-License-Identifier: Apache-2.0
"""The share of each request, on the device: two launches after the trees have grown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.round.meter import ONE
from vllm_ddtree.share.calibration import bin_of_claim
from vllm_ddtree.share.reference import WORTH

if TYPE_CHECKING:
    from vllm_ddtree.round.trees import TreeBuffers

ELEMENTS = 8192
"""Nodes that the second kernel looks at together."""
LEVEL_BITS = ONE.bit_length()


class Shares:
    """Persistent buffers: what each request of a batch verifies.

    Args:
        max_num_reqs: most requests of a batch.
        budget: most nodes of a tree.
        device: of the trees.

    """

    def __init__(self, max_num_reqs: int, budget: int, device: torch.device | str) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.nodes = empty(max_num_reqs)
        """int32 [max_num_reqs], by place in the batch."""
        self.starts = empty(max_num_reqs + 1)
        """int32 [max_num_reqs + 1], first row of each request, a root and its nodes; behind the
        last one the end of all."""
        self._block = triton.next_power_of_2(budget)
        self._levels = empty(max_num_reqs, self._block)

    def assign(
        self,
        trees: TreeBuffers,
        worth: torch.Tensor,
        indices: torch.Tensor,
        capacities: torch.Tensor,
        total: int,
    ) -> None:
        """Share `total` nodes among the requests of a batch, as `reference.share_nodes`.

        Where trees have fewer nodes than that, unused rows make up for them. No host
        synchronisation.

        Args:
            trees: grown.
            worth: int64 [32, 64], `Calibration.worth`.
            indices: int64 [num_reqs], index of each request.
            capacities: int32 [num_reqs], most nodes of each, at most the trees' budget.
            total: nodes, at most the sum of `capacities`.

        Raises:
            ValueError: the batch has more requests than the buffers.

        """
        num_reqs = indices.shape[0]
        if num_reqs > self.nodes.shape[0]:
            raise ValueError(
                f"a batch of {num_reqs} requests exceeds the buffers ({self.nodes.shape[0]})"
            )
        _levels_kernel[(num_reqs,)](
            trees.claims,
            trees.depths,
            worth,
            worth.stride(0),
            indices,
            capacities,
            self._levels,
            NUM_ROWS=trees.num_rows,
            BLOCK=self._block,
            WORTH=WORTH,
            ONE=ONE,
            num_warps=1,
        )
        _assign_kernel[(1,)](
            self._levels,
            self.nodes,
            self.starts,
            num_reqs,
            self.starts.shape[0],
            total,
            BLOCK=self._block,
            REQS=max(1, ELEMENTS // self._block),
            BITS=LEVEL_BITS,
            num_warps=8,
        )


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _levels_kernel(
    claims_ptr,  # int32 [S, 2, NUM_ROWS]
    depths_ptr,  # int32 [S, NUM_ROWS]
    worth_ptr,  # int64 [32, 64]
    worth_stride,
    indices_ptr,  # int64 [num_reqs]
    capacities_ptr,  # int32 [num_reqs]
    levels_ptr,  # int32 [num_reqs, BLOCK]
    NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WORTH: tl.constexpr,
    ONE: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    index = tl.load(indices_ptr + req).to(tl.int64)
    node = tl.arange(0, BLOCK)
    there = node + 1 < NUM_ROWS
    claim = tl.load(claims_ptr + index * (2 * NUM_ROWS) + node + 1, mask=there, other=0)
    depth = tl.load(depths_ptr + index * NUM_ROWS + node + 1, mask=there, other=0)
    worth = tl.load(worth_ptr + depth * worth_stride + bin_of_claim(claim), mask=there, other=0)
    chance = tl.minimum(claim.to(tl.int64) * worth // WORTH, ONE).to(tl.int32)
    # No node is worth more than one before it: what is taken is the beginning of the tree.
    level = tl.associative_scan(chance, 0, _smaller)
    level = tl.where(node < tl.load(capacities_ptr + req), level, -1)
    tl.store(levels_ptr + req * BLOCK + node, level)


# The counts change every round: specialising on them would compile during serving.
@triton.jit(do_not_specialize=["num_reqs", "num_starts", "total"])
def _assign_kernel(
    levels_ptr,  # int32 [num_reqs, BLOCK]
    nodes_ptr,  # int32 [num_reqs]
    starts_ptr,  # int32 [num_starts]
    num_reqs,
    num_starts,
    total,
    BLOCK: tl.constexpr,
    REQS: tl.constexpr,
    BITS: tl.constexpr,
):
    node = tl.arange(0, BLOCK)[None, :]
    # The level of the last node that is taken, bit by bit: the highest that `total` nodes reach.
    last = 0
    for i in range(0, BITS):
        higher = last | (1 << (BITS - 1 - i))
        reach = 0
        for first in range(0, num_reqs, REQS):
            req = first + tl.arange(0, REQS)[:, None]
            level = tl.load(levels_ptr + req * BLOCK + node, mask=req < num_reqs, other=-1)
            reach += tl.sum(tl.sum((level >= higher).to(tl.int32), axis=1), axis=0)
        last = tl.where(reach >= total, higher, last)

    above = 0
    for first in range(0, num_reqs, REQS):
        req = first + tl.arange(0, REQS)[:, None]
        level = tl.load(levels_ptr + req * BLOCK + node, mask=req < num_reqs, other=-1)
        above += tl.sum(tl.sum((level > last).to(tl.int32), axis=1), axis=0)
    # Of the nodes of that very level the first ones.
    left = total - above
    start = 0
    tl.store(starts_ptr, 0)
    for first in range(0, num_reqs, REQS):
        place = first + tl.arange(0, REQS)
        req = place[:, None]
        level = tl.load(levels_ptr + req * BLOCK + node, mask=req < num_reqs, other=-1)
        equal = tl.sum((level == last).to(tl.int32), axis=1)
        before = tl.cumsum(equal, axis=0) - equal
        taken = tl.minimum(tl.maximum(left - before, 0), equal)
        nodes = tl.sum((level > last).to(tl.int32), axis=1) + taken
        rows = tl.where(place < num_reqs, nodes + 1, 0)
        tl.store(nodes_ptr + place, nodes, mask=place < num_reqs)
        tl.store(starts_ptr + place + 1, start + tl.cumsum(rows, axis=0), mask=place < num_reqs)
        left -= tl.sum(taken, axis=0)
        start += tl.sum(rows, axis=0)
    for first in range(num_reqs + 1, num_starts, 1024):
        place = first + tl.arange(0, 1024)
        tl.store(starts_ptr + place, start, mask=place < num_starts)
