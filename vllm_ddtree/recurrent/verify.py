# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of tree rows, all rows of a tree in one chunk.

`reference.py` has the mathematics. No row has a recurrent state: a program reads its part of the
committed state once, and writes outputs. The state itself stays; `commit.py` moves it on.

`products.py` has the matrix products and the triangular system. Trees of more than one block of
rows are solved block after block.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton

from vllm_ddtree.recurrent.checks import check_contiguous, check_masks
from vllm_ddtree.recurrent.layer import RecurrentLayer
from vllm_ddtree.recurrent.products import (
    inverse_norm,
    load_rows,
    path_decay,
    product,
    solve,
    state_product,
)
from vllm_ddtree.recurrent.rows import TreeStep, on_path


def tree_delta_rule(
    layer: RecurrentLayer,
    step: TreeStep,
    inputs: torch.Tensor,
    gates: torch.Tensor,
    out: torch.Tensor,
    updates: torch.Tensor | None = None,
    block_v: int | None = None,
) -> None:
    """Write outputs of the tree rows; rows outside trees stay as they are.

    `tree_inputs` of the same layer must be the kernel before this one: where the GPU can, this one
    starts beside it and reads the state meanwhile.

    Args:
        layer: the committed states, which are read only.
        step: the tree rows.
        inputs: [T, C], queries, keys and values after the convolution.
        gates: float32 [max_tree_rows, 3, Hv], as `tree_inputs` left them in the stash.
        out: [T, Hv, V].
        updates: float32 [max_tree_rows, Hv, V], scratch for trees of more than BLOCK_ROWS rows; one
            serves all layers.
        block_v: value columns of a program; by the size of the batch if not given.

    Raises:
        ValueError: a tensor is not contiguous in its last dimension, the masks have fewer than
            `step.max_tail` bits, or scratch is missing.

    """
    check_contiguous(inputs, step.masks, out, gates)
    check_masks(step)
    block_m = step.block_rows
    if step.max_tail > block_m and updates is None:
        raise ValueError(f"trees of more than {block_m} rows need scratch for their updates")
    if block_v is None:
        block_v = _value_columns(step.num_reqs * layer.num_heads, layer.value_dim)
    grid = (triton.cdiv(layer.value_dim, block_v), layer.num_heads, step.num_reqs)
    levels = min(block_m, step.max_depth + 1)
    _tree_delta_rule_kernel[grid](
        inputs,
        layer.states,
        step.state_indices,
        step.rows.starts,
        step.rows.levels,
        step.masks,
        step.query_start_loc,
        step.tail_lens,
        gates,
        out,
        updates,
        layer.key_dim**-0.5,
        inputs.stride(0),
        *layer.states.stride()[:3],
        step.masks.stride(0),
        step.masks.shape[1],
        *gates.stride()[:2],
        *out.stride()[:2],
        *(updates.stride()[:2] if updates is not None else (0, 0)),
        GROUP=layer.num_heads // layer.num_key_heads,
        KEY_HEADS=layer.num_key_heads,
        KEY_DIM=layer.key_dim,
        VALUE_DIM=layer.value_dim,
        BLOCK_K=max(16, triton.next_power_of_2(layer.key_dim)),
        BLOCK_V=block_v,
        BLOCK_M=block_m,
        BLOCKS=step.max_tail > block_m,
        HALVINGS=max(2, (levels - 1).bit_length()),
        EXACT=inputs.dtype == torch.float32,
        launch_pdl=current_platform.is_arch_support_pdl(),
        # The registers of four warps do not hold rows of 256.
        num_warps=4 if layer.key_dim <= 128 else 8,
        num_stages=1,
    )


def _value_columns(num_heads: int, value_dim: int) -> int:
    """Value columns of one program, for `num_heads` (request, value head) pairs.

    Every program of a head solves the same system. Few columns spread a small batch over the GPU;
    once it is full, more columns solve less often.
    """
    return min(32 if num_heads <= 128 else 64, max(16, triton.next_power_of_2(value_dim)))


@triton.jit
def _tree_delta_rule_kernel(
    inputs_ptr,  # [T, 2 * KEY_HEADS * KEY_DIM + Hv * VALUE_DIM]
    states_ptr,  # [N, Hv, VALUE_DIM, KEY_DIM]
    state_indices_ptr,  # [R]
    starts_ptr,  # [R]
    levels_ptr,  # [max_tree_rows]
    masks_ptr,  # [T, num_words]
    query_start_loc_ptr,  # [R + 1]
    tail_lens_ptr,  # [R]
    gates_ptr,  # [max_tree_rows, 3, Hv]
    out_ptr,  # [T, Hv, VALUE_DIM]
    updates_ptr,  # [max_tree_rows, Hv, VALUE_DIM] if BLOCKS
    scale,
    inputs_stride,
    state_stride_n,
    state_stride_h,
    state_stride_v,
    mask_stride,
    num_words,
    gates_stride_t,
    gates_stride_g,
    out_stride_t,
    out_stride_h,
    updates_stride_t,
    updates_stride_h,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,  # whether a tree may have more than BLOCK_M rows
    HALVINGS: tl.constexpr,  # log2 of the levels of a block, at least 2
    EXACT: tl.constexpr,  # whether products are float32's own
    launch_pdl: tl.constexpr,  # whether this starts beside `tree_inputs`, the kernel before it
):
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    req = tl.program_id(2)
    tail_len = tl.load(tail_lens_ptr + req)
    state_index = tl.load(state_indices_ptr + req).to(tl.int64)
    if (tail_len == 0) | (state_index <= 0):
        if launch_pdl:
            tl.extra.cuda.gdc_wait()
        return

    root = (tl.load(query_start_loc_ptr + req + 1) - tail_len).to(tl.int64)
    start = tl.load(starts_ptr + req).to(tl.int64)
    query_ptr = inputs_ptr + root * inputs_stride + head // GROUP * KEY_DIM
    key_ptr = query_ptr + KEY_HEADS * KEY_DIM
    value_ptr = inputs_ptr + root * inputs_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    masks_ptr += root * mask_stride
    levels_ptr += start
    beta_ptr = gates_ptr + start * gates_stride_t + gates_stride_g + head
    total_ptr = beta_ptr + gates_stride_g
    out_ptr += root * out_stride_t + head * out_stride_h
    if BLOCKS:
        updates_ptr += start * updates_stride_t + head * updates_stride_h

    dim = tl.arange(0, BLOCK_K)
    in_dim = dim < KEY_DIM
    in_columns = column < VALUE_DIM
    state_ptr = states_ptr + state_index * state_stride_n + head * state_stride_h
    state = load_rows(state_ptr, column, state_stride_v, in_columns, dim, in_dim).to(tl.float32)
    if launch_pdl:
        # The state does not come from `tree_inputs`; all that follows does.
        tl.extra.cuda.gdc_wait()
    i = tl.arange(0, BLOCK_M)
    # One block is no loop: a compiled loop keeps much more in registers than one pass needs.
    for first in range(0, tail_len if BLOCKS else 1, BLOCK_M):
        node = first + i
        in_tree = node < tail_len
        q = load_rows(query_ptr, node, inputs_stride, in_tree, dim, in_dim)
        k = load_rows(key_ptr, node, inputs_stride, in_tree, dim, in_dim)
        v = load_rows(value_ptr, node, inputs_stride, in_tree, column, in_columns).to(tl.float32)
        beta = tl.load(beta_ptr + node * gates_stride_t, mask=in_tree, other=0.0)
        total = tl.load(total_ptr + node * gates_stride_t, mask=in_tree, other=0.0)
        level = tl.load(levels_ptr + node, mask=in_tree, other=0)
        q_norm = inverse_norm(q) * scale
        k_norm = inverse_norm(k)

        kept = tl.exp(total)
        right = v - state_product(k, state, EXACT) * (kept * k_norm)[:, None]
        out = state_product(q, state, EXACT) * (kept * q_norm)[:, None]
        if BLOCKS:
            for before in range(0, first, BLOCK_M):
                earlier = before + i  # all in the tree
                k_before = load_rows(key_ptr, earlier, inputs_stride, i >= 0, dim, in_dim)
                u_before = load_rows(
                    updates_ptr, earlier, updates_stride_t, i >= 0, column, in_columns
                )
                sees = on_path(masks_ptr, mask_stride, num_words, node, in_tree, before, BLOCK_M)
                decay = path_decay(sees, total, tl.load(total_ptr + earlier * gates_stride_t))
                decay *= inverse_norm(k_before)[None, :]
                by_key = decay * tl.dot(k, tl.trans(k_before), input_precision="ieee")
                right -= k_norm[:, None] * product(by_key, u_before, EXACT)
                by_query = decay * tl.dot(q, tl.trans(k_before), input_precision="ieee")
                out += q_norm[:, None] * product(by_query, u_before, EXACT)

        sees = on_path(masks_ptr, mask_stride, num_words, node, in_tree, first, BLOCK_M)
        decay = path_decay(sees, total, total) * k_norm[None, :]
        m = decay * (beta * k_norm)[:, None] * tl.dot(k, tl.trans(k), input_precision="ieee")
        m = tl.where(i[:, None] == i[None, :], 0.0, m)
        u = solve(m, level, right * beta[:, None], BLOCK_M, HALVINGS, EXACT)
        if BLOCKS:
            tl.store(
                updates_ptr + node[:, None] * updates_stride_t + column[None, :],
                u,
                mask=in_tree[:, None] & in_columns[None, :],
            )
            tl.debug_barrier()
        p = decay * q_norm[:, None] * tl.dot(q, tl.trans(k), input_precision="ieee")
        out += product(p, u, EXACT)
        tl.store(
            out_ptr + node[:, None] * out_stride_t + column[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=in_tree[:, None] & in_columns[None, :],
        )
