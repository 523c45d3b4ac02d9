# SPDX-License-Identifier: Apache-2.0
"""What claims have been worth, counted on the device from the rounds that are served.

The counts follow from trees and accepted paths, which are the same on every rank, and so does all
that is made of them. The host reads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.round.meter import ONE
from vllm_ddtree.share.reference import BINS, DEPTHS, PRIOR, WINDOW, WORTH

if TYPE_CHECKING:
    from vllm_ddtree.round.paths import Paths
    from vllm_ddtree.round.trees import TreeBuffers

LANES = 64
"""Bins in memory: a power of two."""


class Calibration:
    """The counts, and what follows from them.

    Args:
        device: of the trees.

    """

    def __init__(self, device: torch.device | str) -> None:
        self.counts = torch.zeros(2, DEPTHS, LANES, dtype=torch.int64, device=device)
        """int64 [2, 32, 64], claims summed and nodes accepted, by depth and bin. Row 0 counts the
        rounds, each with a claim of 2^20."""
        self.worth = torch.full((DEPTHS, LANES), WORTH, dtype=torch.int64, device=device)
        """int64 [32, 64], what claims are worth, in 1 / 2^16, as of the last `refresh`."""

    def observe(
        self, trees: TreeBuffers, indices: torch.Tensor, num_rows: torch.Tensor, paths: Paths
    ) -> None:
        """Count the nodes of a step, after its walk.

        Args:
            trees: of the step, as they grew.
            indices: int64 [num_reqs], index of each request.
            num_rows: int32 [num_reqs or more], rows of each tree that were verified; 0: none.
            paths: accepted.

        """
        _observe_kernel[(indices.shape[0],)](
            trees.claims,
            trees.parents,
            trees.depths,
            indices,
            num_rows,
            paths.rows,
            paths.rows.stride(0),
            paths.lens,
            self.counts,
            NUM_ROWS=trees.num_rows,
            BLOCK=triton.next_power_of_2(trees.num_rows),
            DEPTHS=DEPTHS,
            LANES=LANES,
            ROOT=BINS - 1,
            num_warps=1,
        )

    def refresh(self) -> None:
        """Bring `worth` up to the counts, and halve these when they are many."""
        _refresh_kernel[(1,)](
            self.counts,
            self.worth,
            DEPTHS=DEPTHS,
            LANES=LANES,
            BINS=BINS,
            PRIOR=PRIOR,
            WORTH=WORTH,
            ONE=ONE,
            MOST=WINDOW * ONE,
        )


@triton.jit
def bin_of_claim(claim):
    """Bin of int32 claims up to 2^20, which float32 holds exactly: exponent and first bit."""
    bits = tl.maximum(claim, 1).to(tl.float32).to(tl.int32, bitcast=True)
    return (bits >> 22) - 254


@triton.jit
def _observe_kernel(
    claims_ptr,  # int32 [S, 2, NUM_ROWS]
    parents_ptr,  # int32 [S, NUM_ROWS]
    depths_ptr,  # int32 [S, NUM_ROWS]
    indices_ptr,  # int64 [num_reqs]
    num_rows_ptr,  # int32 [num_reqs]
    path_rows_ptr,  # int32 [num_reqs, P]
    path_rows_stride,
    path_lens_ptr,  # int32 [num_reqs]
    counts_ptr,  # int64 [2, DEPTHS, LANES]
    NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTHS: tl.constexpr,
    LANES: tl.constexpr,
    ROOT: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    index = tl.load(indices_ptr + req).to(tl.int64)
    num_rows = tl.load(num_rows_ptr + req)
    if (index >= 0) & (num_rows > 0):
        row = tl.arange(0, BLOCK)
        there = row < num_rows
        rows = index * NUM_ROWS + row
        parent = tl.load(parents_ptr + rows, mask=there, other=-1)
        depth = tl.load(depths_ptr + rows, mask=there, other=0)
        claim = tl.load(claims_ptr + index * (2 * NUM_ROWS) + row, mask=there, other=0)
        accepted = tl.zeros([BLOCK], tl.int64)
        for j in range(1, tl.load(path_lens_ptr + req)):
            on_path = tl.load(path_rows_ptr + req * path_rows_stride + j)
            accepted = tl.where(row == on_path, 1, accepted)
        counted = (parent >= 0) & (claim > 0)
        cell = depth * LANES + bin_of_claim(claim)
        cell = tl.where(row == 0, ROOT, cell)
        counted = counted | (row == 0)
        tl.atomic_add(counts_ptr + cell, claim.to(tl.int64), mask=counted, sem="relaxed")
        tl.atomic_add(counts_ptr + DEPTHS * LANES + cell, accepted, mask=counted, sem="relaxed")


@triton.jit
def _refresh_kernel(
    counts_ptr,  # int64 [2, DEPTHS, LANES]
    worth_ptr,  # int64 [DEPTHS, LANES]
    DEPTHS: tl.constexpr,
    LANES: tl.constexpr,
    BINS: tl.constexpr,
    PRIOR: tl.constexpr,
    WORTH: tl.constexpr,
    ONE: tl.constexpr,
    MOST: tl.constexpr,
):
    depth = tl.arange(0, DEPTHS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    cells = depth * LANES + lane
    all_claimed = tl.load(counts_ptr + cells)
    all_accepted = tl.load(counts_ptr + DEPTHS * LANES + cells)
    claimed = tl.where(depth > 0, all_claimed, 0)
    accepted = tl.where(depth > 0, all_accepted, 0) * (ONE * WORTH)

    claimed_at = tl.sum(claimed, axis=1)
    accepted_at = tl.sum(accepted, axis=1)
    of_all = (tl.sum(accepted_at, axis=0) + PRIOR * WORTH) // (tl.sum(claimed_at, axis=0) + PRIOR)
    of_depth = (accepted_at + PRIOR * of_all) // (claimed_at + PRIOR)
    worth = (accepted + PRIOR * of_depth[:, None]) // (claimed + PRIOR)
    tl.store(worth_ptr + cells, tl.where((depth > 0) & (lane < BINS), worth, WORTH))

    rounds = tl.sum(tl.sum(tl.where(depth == 0, all_claimed, 0), axis=1), axis=0)
    many = rounds >= MOST
    tl.store(counts_ptr + cells, all_claimed // 2, mask=many & (lane < LANES))
    tl.store(counts_ptr + DEPTHS * LANES + cells, all_accepted // 2, mask=many & (lane < LANES))
