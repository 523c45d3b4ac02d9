# SPDX-License-Identifier: Apache-2.0
"""The rule of Kimi delta attention over tree rows, all rows of a tree in one chunk.

`reference_kda.py` has the mathematics. A decay for each key channel stays inside the products of
rows with rows. Splitting it, exp(G_i) exp(-G_l), would overflow: a path may forget more than
float32 can hold. So the products are summed as they stand, with exponents that are never positive,
in a kernel of its own that all value columns of a head share. The rest is as in `verify.py`.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.recurrent.checks import check_contiguous, check_masks
from vllm_ddtree.recurrent.kda import KDALayer
from vllm_ddtree.recurrent.products import inverse_norm, load_rows, product, solve
from vllm_ddtree.recurrent.rows import BLOCK_ROWS, TreeStep, on_path

TILE = 16
"""Rows of a program of the products."""


class KDAScratch:
    """What the kernels of one layer hand on, persistent; one serves all layers.

    Args:
        max_tree_rows: most tree rows of a step.
        num_rows: most rows of a tree.
        num_heads: heads.
        key_dim: key channels of a head.
        value_dim: value columns of a head.
        device: where it lies.

    """

    def __init__(
        self,
        max_tree_rows: int,
        num_rows: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        device: torch.device | str,
    ) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(max_tree_rows, num_heads, *shape, device=device)

        self.totals = zeros(key_dim)
        """float32 [max_tree_rows, H, K], the decays' sums along paths."""
        self.scores = zeros(2, num_rows)
        """float32 [max_tree_rows, H, 2, num_rows], decayed products of a row's key, and of its
        query, with the keys of the tree's rows. Of rows that are no ancestors: anything."""
        self.updates = zeros(value_dim) if num_rows > BLOCK_ROWS else None
        """float32 [max_tree_rows, H, V], for trees of more than one block of rows."""


def tree_kda(
    layer: KDALayer,
    step: TreeStep,
    inputs: torch.Tensor,
    gates: torch.Tensor,
    out: torch.Tensor,
    scratch: KDAScratch,
    block_v: int | None = None,
) -> None:
    """Write outputs of the tree rows; rows outside trees stay as they are.

    Args:
        layer: the committed states, which are read only.
        step: the tree rows.
        inputs: [T, C], queries, keys and values after the convolution.
        gates: float32 [max_tree_rows, H, K + 1], from `kda_gates`.
        out: [T, H, V].
        scratch: `totals` from `kda_gates`.
        block_v: value columns of a program.

    Raises:
        ValueError: a tensor is not contiguous in its last dimension, or the masks or the scratch
            have fewer than `step.max_tail` bits or columns.

    """
    check_contiguous(inputs, step.masks, out, gates)
    check_masks(step)
    columns = scratch.scores.shape[3]
    if columns < step.max_tail:
        raise ValueError(f"{step.max_tail} tree rows need as many columns, scratch has {columns}")
    scale = layer.key_dim**-0.5
    block_k = max(16, triton.next_power_of_2(layer.key_dim))
    of_step = (
        step.state_indices,
        step.rows.starts,
        step.masks,
        step.query_start_loc,
        step.tail_lens,
        scratch.totals,
        scratch.scores,
    )
    strides = (
        inputs.stride(0),
        step.masks.stride(0),
        *scratch.totals.stride()[:2],
        *scratch.scores.stride()[:3],
    )
    heads, reqs = layer.num_heads, step.num_reqs
    _scores_kernel[(triton.cdiv(step.max_tail, TILE), heads, reqs)](
        inputs,
        *of_step,
        scale,
        *strides,
        KEY_HEADS=heads,
        KEY_DIM=layer.key_dim,
        BLOCK_K=block_k,
        TILE=TILE,
        num_warps=4,
    )
    block_m = step.block_rows
    if block_v is None:
        block_v = min(32, max(16, triton.next_power_of_2(layer.value_dim)))
    updates = scratch.updates
    levels = min(block_m, step.max_depth + 1)
    _tree_kda_kernel[(triton.cdiv(layer.value_dim, block_v), heads, reqs)](
        inputs,
        layer.states,
        *of_step,
        step.rows.levels,
        gates,
        out,
        updates,
        scale,
        step.masks.shape[1],
        *strides,
        *layer.states.stride()[:3],
        *gates.stride()[:2],
        *out.stride()[:2],
        *(updates.stride()[:2] if updates is not None else (0, 0)),
        KEY_HEADS=heads,
        KEY_DIM=layer.key_dim,
        VALUE_DIM=layer.value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        BLOCK_M=block_m,
        BLOCKS=step.max_tail > block_m,
        HALVINGS=max(2, (levels - 1).bit_length()),
        EXACT=inputs.dtype == torch.float32,
        num_warps=4 if layer.key_dim <= 64 else 8,
        num_stages=1,
    )


@triton.jit
def _scores_kernel(
    inputs_ptr,  # [T, 2 * KEY_HEADS * KEY_DIM + H * V]
    state_indices_ptr,  # [R]
    starts_ptr,  # [R]
    masks_ptr,  # [T, num_words]
    query_start_loc_ptr,  # [R + 1]
    tail_lens_ptr,  # [R]
    totals_ptr,  # [max_tree_rows, H, KEY_DIM]
    scores_ptr,  # [max_tree_rows, H, 2, columns]
    scale,
    inputs_stride,
    mask_stride,
    totals_stride_t,
    totals_stride_h,
    scores_stride_t,
    scores_stride_h,
    scores_stride_q,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Products of the rows' keys and queries with the keys of their ancestors and their own."""
    first = tl.program_id(0) * TILE
    head = tl.program_id(1)
    req = tl.program_id(2)
    tail_len = tl.load(tail_lens_ptr + req)
    if (first >= tail_len) | (tl.load(state_indices_ptr + req) <= 0):
        return
    root = (tl.load(query_start_loc_ptr + req + 1) - tail_len).to(tl.int64)
    start = tl.load(starts_ptr + req).to(tl.int64)
    query_ptr = inputs_ptr + root * inputs_stride + head * KEY_DIM
    key_ptr = query_ptr + KEY_HEADS * KEY_DIM
    totals_ptr += start * totals_stride_t + head * totals_stride_h

    dim = tl.arange(0, BLOCK_K)
    in_dim = dim < KEY_DIM
    node = first + tl.arange(0, TILE)
    in_tree = node < tail_len
    q = load_rows(query_ptr, node, inputs_stride, in_tree, dim, in_dim)
    k = load_rows(key_ptr, node, inputs_stride, in_tree, dim, in_dim)
    total = load_rows(totals_ptr, node, totals_stride_t, in_tree, dim, in_dim)
    q_norm, k_norm = inverse_norm(q) * scale, inverse_norm(k)
    q, k = q.to(tl.float32), k.to(tl.float32)
    masks_ptr += (root + node) * mask_stride
    scores_ptr += (start + node) * scores_stride_t + head * scores_stride_h
    # Rows come after their ancestors.
    for other in range(0, tl.minimum(first + TILE, tail_len)):
        bits = tl.load(masks_ptr + other // 32, mask=in_tree, other=0)
        sees = ((bits >> (other % 32)) & 1) != 0
        key = tl.load(key_ptr + other * inputs_stride + dim, mask=in_dim, other=0.0).to(tl.float32)
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        total_other = tl.load(totals_ptr + other * totals_stride_t + dim, mask=in_dim, other=0.0)
        # The mask first: between rows that are not related the difference may be positive.
        difference = tl.where(sees[:, None], total - total_other[None, :], float("-inf"))
        decayed = tl.exp(difference) * key[None, :]
        tl.store(scores_ptr + other, tl.sum(k * decayed, 1) * k_norm, mask=in_tree)
        tl.store(
            scores_ptr + scores_stride_q + other, tl.sum(q * decayed, 1) * q_norm, mask=in_tree
        )


@triton.jit
def _tree_kda_kernel(
    inputs_ptr,  # [T, 2 * KEY_HEADS * KEY_DIM + H * VALUE_DIM]
    states_ptr,  # [N, H, VALUE_DIM, KEY_DIM]
    state_indices_ptr,  # [R]
    starts_ptr,  # [R]
    masks_ptr,  # [T, num_words]
    query_start_loc_ptr,  # [R + 1]
    tail_lens_ptr,  # [R]
    totals_ptr,  # [max_tree_rows, H, KEY_DIM]
    scores_ptr,  # [max_tree_rows, H, 2, columns]
    levels_ptr,  # [max_tree_rows]
    gates_ptr,  # [max_tree_rows, H, KEY_DIM + 1]
    out_ptr,  # [T, H, VALUE_DIM]
    updates_ptr,  # [max_tree_rows, H, VALUE_DIM] if BLOCKS
    scale,
    num_words,
    inputs_stride,
    mask_stride,
    totals_stride_t,
    totals_stride_h,
    scores_stride_t,
    scores_stride_h,
    scores_stride_q,
    state_stride_n,
    state_stride_h,
    state_stride_v,
    gates_stride_t,
    gates_stride_h,
    out_stride_t,
    out_stride_h,
    updates_stride_t,
    updates_stride_h,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,  # whether a tree may have more than BLOCK_M rows
    HALVINGS: tl.constexpr,  # log2 of the levels of a block, at least 2
    EXACT: tl.constexpr,  # whether products are float32's own
):
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    req = tl.program_id(2)
    tail_len = tl.load(tail_lens_ptr + req)
    state_index = tl.load(state_indices_ptr + req).to(tl.int64)
    if (tail_len == 0) | (state_index <= 0):
        return

    root = (tl.load(query_start_loc_ptr + req + 1) - tail_len).to(tl.int64)
    start = tl.load(starts_ptr + req).to(tl.int64)
    query_ptr = inputs_ptr + root * inputs_stride + head * KEY_DIM
    key_ptr = query_ptr + KEY_HEADS * KEY_DIM
    value_ptr = inputs_ptr + root * inputs_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    masks_ptr += root * mask_stride
    levels_ptr += start
    totals_ptr += start * totals_stride_t + head * totals_stride_h
    scores_ptr += start * scores_stride_t + head * scores_stride_h
    beta_ptr = gates_ptr + start * gates_stride_t + head * gates_stride_h + KEY_DIM
    out_ptr += root * out_stride_t + head * out_stride_h
    if BLOCKS:
        updates_ptr += start * updates_stride_t + head * updates_stride_h

    dim = tl.arange(0, BLOCK_K)
    in_dim = dim < KEY_DIM
    in_columns = column < VALUE_DIM
    state_ptr = states_ptr + state_index * state_stride_n + head * state_stride_h
    state = load_rows(state_ptr, column, state_stride_v, in_columns, dim, in_dim).to(tl.float32)
    i = tl.arange(0, BLOCK_M)
    # One block is no loop: a compiled loop keeps much more in registers than one pass needs.
    for first in range(0, tail_len if BLOCKS else 1, BLOCK_M):
        node = first + i
        in_tree = node < tail_len
        kept = tl.exp(load_rows(totals_ptr, node, totals_stride_t, in_tree, dim, in_dim))
        k = load_rows(key_ptr, node, inputs_stride, in_tree, dim, in_dim)
        v = load_rows(value_ptr, node, inputs_stride, in_tree, column, in_columns).to(tl.float32)
        k_norm = inverse_norm(k)
        right = v - product(k.to(tl.float32) * kept, tl.trans(state), EXACT) * k_norm[:, None]
        q = load_rows(query_ptr, node, inputs_stride, in_tree, dim, in_dim)
        q_norm = inverse_norm(q) * scale
        out = product(q.to(tl.float32) * kept, tl.trans(state), EXACT) * q_norm[:, None]
        scores = scores_ptr + node * scores_stride_t
        if BLOCKS:
            for before in range(0, first, BLOCK_M):
                earlier = before + i  # all in the tree
                u_before = load_rows(
                    updates_ptr, earlier, updates_stride_t, i >= 0, column, in_columns
                )
                sees = on_path(masks_ptr, mask_stride, num_words, node, in_tree, before, BLOCK_M)
                by_key = tl.load(scores[:, None] + earlier[None, :], mask=sees, other=0.0)
                right -= product(by_key, u_before, EXACT)
                by_query = tl.load(
                    scores[:, None] + scores_stride_q + earlier[None, :], mask=sees, other=0.0
                )
                out += product(by_query, u_before, EXACT)

        beta = tl.load(beta_ptr + node * gates_stride_t, mask=in_tree, other=0.0)
        level = tl.load(levels_ptr + node, mask=in_tree, other=0)
        sees = on_path(masks_ptr, mask_stride, num_words, node, in_tree, first, BLOCK_M)
        proper = sees & (i[:, None] != i[None, :])
        m = tl.load(scores[:, None] + node[None, :], mask=proper, other=0.0) * beta[:, None]
        u = solve(m, level, right * beta[:, None], BLOCK_M, HALVINGS, EXACT)
        if BLOCKS:
            tl.store(
                updates_ptr + node[:, None] * updates_stride_t + column[None, :],
                u,
                mask=in_tree[:, None] & in_columns[None, :],
            )
            tl.debug_barrier()
        p = tl.load(scores[:, None] + scores_stride_q + node[None, :], mask=sees, other=0.0)
        out += product(p, u, EXACT)
        tl.store(
            out_ptr + node[:, None] * out_stride_t + column[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=in_tree[:, None] & in_columns[None, :],
        )
