# SPDX-License-Identifier: Apache-2.0
"""Positions of several axes (M-RoPE, XD-RoPE) for the rows of trees.

vLLM fills the positions of such a target by row (v1/worker/gpu/mm/rope.py). A row of the prompt has
its own position on each axis. A row behind the prompt has one value on all axes: the number of
tokens before it plus the request's delta, which is what images and videos have saved or added. vLLM
takes drafts for a chain, so it counts on from row to row. A node of a tree stands at its depth.
"""

from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm_ddtree.round.layout import Layout
    from vllm_ddtree.round.rows import RowBuffers

BLOCK = 64


def place_nodes(
    rows: "RowBuffers",
    layout: "Layout",
    deltas: torch.Tensor,
    positions: torch.Tensor,
    max_tree_rows: int,
) -> None:
    """Set the positions of all nodes of a batch, in one launch.

    Roots and rows outside trees keep what vLLM has written. The last token of a prompt may be an
    image's, so a root may stand at another place on each axis; its nodes never do.

    Args:
        rows: filled for the batch; their `positions` have one axis and count tokens.
        layout: of the batch.
        deltas: int32 [max_num_reqs], by index: what is added to them behind the prompt.
        positions: int64 [axes, num_tokens or more], written.
        max_tree_rows: rows of the largest tree; it sizes the grid and does not change the result.

    """
    _place_nodes_kernel[(layout.num_reqs, max(1, triton.cdiv(max_tree_rows, BLOCK)))](
        rows.positions,
        rows.tail_lens,
        layout.indices,
        layout.query_start_loc,
        deltas,
        positions,
        positions.stride(0),
        NUM_AXES=positions.shape[0],
        BLOCK=BLOCK,
    )


@triton.jit(do_not_specialize=["axis_stride"])
def _place_nodes_kernel(
    row_positions_ptr,  # [num_tokens]
    tail_lens_ptr,  # [num_reqs]
    indices_ptr,  # [num_reqs]
    query_start_loc_ptr,  # [num_reqs + 1]
    deltas_ptr,  # [max_num_reqs]
    positions_ptr,  # [NUM_AXES, num_tokens]
    axis_stride,
    NUM_AXES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    tail_len = tl.load(tail_lens_ptr + req)
    if tail_len > 0:
        end = tl.load(query_start_loc_ptr + req + 1)
        delta = tl.load(deltas_ptr + tl.load(indices_ptr + req))
        # A step of vLLM's start-up has no rows filled; those before may have had longer trees.
        root = tl.maximum(end - tail_len, tl.load(query_start_loc_ptr + req))
        for i in range(root + first, end, step):
            row = i + tl.arange(0, BLOCK)
            is_node = (row > root) & (row < end)
            position = tl.load(row_positions_ptr + row, mask=is_node, other=0) + delta
            for axis in tl.static_range(NUM_AXES):
                tl.store(positions_ptr + axis * axis_stride + row, position, mask=is_node)
