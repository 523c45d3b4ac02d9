# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of tree rows, all rows of a tree in one chunk.

`reference.py` has the mathematics. No row has a recurrent state: a program reads its part of the
committed state once, and writes outputs. The state itself stays; `commit.py` moves it on.

The triangular system (I + M) U = R is solved by levels. A row's level is the number of its
ancestors in its block of rows, and M only leads from lower levels to higher ones. The inverse of
the diagonal parts of M over groups of 2^s levels, T_s, starts as the identity (one level), and

    T_{s+1} = T_s - T_s M_s T_s        M_s: M from the lower to the upper half of each new group

so log2(levels) products give the inverse: 4 for trees of depth 15, whatever the number of rows.
Each T_s is an inverse in itself and its entries stay small, unlike the powers of M, which an
expansion in them would have to cancel. Trees of more than one block of rows are solved block after
block.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.recurrent.rows import RecurrentRows

MAX_BLOCK_ROWS = 64


def tree_delta_rule(
    rows_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    rows: RecurrentRows,
    row_masks: torch.Tensor,
    query_start_loc: torch.Tensor,
    tail_lens: torch.Tensor,
    out: torch.Tensor,
    gates: torch.Tensor,
    num_key_heads: int,
    max_tail: int,
    max_depth: int,
    updates: torch.Tensor | None = None,
    block_v: int | None = None,
) -> None:
    """Write outputs and gates of the tree rows; rows outside trees stay as they are.

    Args:
        rows_qkv: [T, 2 * Hk * K + Hv * V], queries, keys and values after the convolution.
        a, b: [T, Hv], inputs of decay and beta.
        A_log, dt_bias: [Hv].
        states: [N, Hv, V, K], any float dtype, contiguous in K.
        state_indices: int32 [at least R], row of `states` of each request; vLLM's null block (0)
            has no state, and its request is skipped.
        rows: `starts` of this step.
        row_masks: int32 [T, W], ancestor bits of tree rows, own bit included.
        query_start_loc: int32 [R + 1].
        tail_lens: int32 [at least R], tree rows at the end of each request, 0 without a tree.
        out: [T, Hv, V].
        gates: float32 [max_tree_rows, 2, Hv], receives log decay and beta of the tree rows.
        num_key_heads: Hk.
        max_tail: upper bound of `tail_lens`.
        max_depth: upper bound of the rows' depths.
        updates: float32 [max_tree_rows, Hv, V + 1], scratch for trees of more than MAX_BLOCK_ROWS
            rows; one serves all layers.
        block_v: value columns of a program; by the size of the batch if not given.

    Raises:
        ValueError: an innermost stride is not 1, the masks have fewer than `max_tail` bits, the
            head counts do not divide, or scratch is missing.

    """
    num_heads, value_dim, key_dim = states.shape[1:]
    tensors = (rows_qkv, a, b, states, row_masks, out, gates)
    if {t.stride(-1) for t in tensors} != {1}:
        raise ValueError("tensors must be contiguous in their last dimension")
    if row_masks.shape[1] * 32 < max_tail:
        raise ValueError(
            f"{max_tail} tree rows need {triton.cdiv(max_tail, 32)} mask words, got "
            f"{row_masks.shape[1]}"
        )
    if num_heads % num_key_heads:
        raise ValueError(f"{num_key_heads} key heads do not divide {num_heads} value heads")
    block_m = min(MAX_BLOCK_ROWS, max(16, triton.next_power_of_2(max_tail)))
    if max_tail > block_m and updates is None:
        raise ValueError(f"trees of more than {block_m} rows need scratch for their updates")
    num_reqs = query_start_loc.shape[0] - 1
    if block_v is None:
        block_v = _value_columns(num_reqs * num_heads, value_dim, key_dim)
    exact = rows_qkv.dtype == torch.float32
    levels = min(block_m, max_depth + 1)
    grid = (triton.cdiv(value_dim, block_v), num_heads, num_reqs)
    _tree_delta_rule_kernel[grid](
        rows_qkv,
        a,
        b,
        A_log,
        dt_bias,
        states,
        state_indices,
        rows.starts,
        row_masks,
        query_start_loc,
        tail_lens,
        out,
        gates,
        updates,
        key_dim**-0.5,
        rows_qkv.stride(0),
        a.stride(0),
        b.stride(0),
        *states.stride()[:3],
        row_masks.stride(0),
        row_masks.shape[1],
        *out.stride()[:2],
        *gates.stride()[:2],
        *(updates.stride()[:2] if updates is not None else (0, 0)),
        GROUP=num_heads // num_key_heads,
        KEY_HEADS=num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_V=block_v,
        BLOCK_M=block_m,
        BLOCKS=max_tail > block_m,
        HALVINGS=max(2, (levels - 1).bit_length()),
        PRECISION="ieee" if exact else "tf32",
        num_warps=4,
        num_stages=1,
    )


def _value_columns(num_heads: int, value_dim: int, key_dim: int) -> int:
    """Value columns of one program, for `num_heads` (request, value head) pairs.

    Every program of a head solves the same system. Few columns spread a small batch over the GPU;
    once it is full, many columns solve less often.
    """
    largest = max(16, triton.next_power_of_2(value_dim))
    columns = 32 if num_heads < 128 else 64
    if key_dim > 128:
        columns = 32
    return min(columns, largest)


@triton.jit
def _tree_delta_rule_kernel(
    rows_qkv_ptr,  # [T, 2 * KEY_HEADS * KEY_DIM + Hv * VALUE_DIM]
    a_ptr,  # [T, Hv]
    b_ptr,  # [T, Hv]
    A_log_ptr,  # [Hv]
    dt_bias_ptr,  # [Hv]
    states_ptr,  # [N, Hv, VALUE_DIM, KEY_DIM]
    state_indices_ptr,  # [R]
    starts_ptr,  # [R]
    row_masks_ptr,  # [T, W]
    query_start_loc_ptr,  # [R + 1]
    tail_lens_ptr,  # [R]
    out_ptr,  # [T, Hv, VALUE_DIM]
    gates_ptr,  # [max_tree_rows, 2, Hv]
    updates_ptr,  # [max_tree_rows, Hv, VALUE_DIM + 1] if BLOCKS: u of each row, and its total decay
    scale,
    qkv_stride,
    a_stride,
    b_stride,
    state_stride_n,
    state_stride_h,
    state_stride_v,
    mask_stride,
    num_words,
    out_stride_t,
    out_stride_h,
    gates_stride_t,
    gates_stride_g,
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
    PRECISION: tl.constexpr,  # of float32 products
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
    dim = tl.arange(0, BLOCK_K)
    in_dim = dim < KEY_DIM
    in_columns = column < VALUE_DIM
    state = tl.load(
        states_ptr
        + state_index * state_stride_n
        + head * state_stride_h
        + column[:, None] * state_stride_v
        + dim[None, :],
        mask=in_columns[:, None] & in_dim[None, :],
        other=0.0,
    ).to(tl.float32)
    decay_rate = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)

    query_ptr = rows_qkv_ptr + root * qkv_stride + head // GROUP * KEY_DIM
    key_ptr = query_ptr + KEY_HEADS * KEY_DIM
    value_ptr = rows_qkv_ptr + root * qkv_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    row_masks_ptr += root * mask_stride
    out_ptr += root * out_stride_t + head * out_stride_h
    gates_ptr += start * gates_stride_t + head
    if BLOCKS:
        updates_ptr += start * updates_stride_t + head * updates_stride_h
    i = tl.arange(0, BLOCK_M)

    for first in range(0, tail_len, BLOCK_M):
        node = first + i
        in_tree = node < tail_len
        q = _load_rows(query_ptr, node, qkv_stride, in_tree, dim, in_dim)
        k = _load_rows(key_ptr, node, qkv_stride, in_tree, dim, in_dim)
        v = _load_rows(value_ptr, node, qkv_stride, in_tree, column, in_columns).to(tl.float32)
        q_norm = _inverse_norm(q) * scale
        k_norm = _inverse_norm(k)

        x = tl.load(a_ptr + (root + node) * a_stride + head, mask=in_tree, other=0.0)
        x = x.to(tl.float32) + dt_bias
        g = decay_rate * tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
        g = tl.where(in_tree, g, 0.0)
        beta = tl.load(b_ptr + (root + node) * b_stride + head, mask=in_tree, other=0.0)
        beta = tl.sigmoid(beta.to(tl.float32))
        if tl.program_id(0) == 0:
            tl.store(gates_ptr + node * gates_stride_t, g, mask=in_tree)
            tl.store(gates_ptr + node * gates_stride_t + gates_stride_g, beta, mask=in_tree)

        # Of the rows of this block, those on each row's path, itself included.
        sees = _on_path(row_masks_ptr, mask_stride, num_words, node, in_tree, first, BLOCK_M)
        level = tl.sum(sees.to(tl.int32), 1) - 1
        total = tl.sum(tl.where(sees, g[None, :], 0.0), 1)
        if BLOCKS:
            # Ancestors' numbers ascend along a path: the last before this block has the total of
            # all before it.
            last = tl.full([BLOCK_M], -1, tl.int32)
            for before in range(0, first, BLOCK_M):
                seen = _on_path(
                    row_masks_ptr, mask_stride, num_words, node, in_tree, before, BLOCK_M
                )
                last = tl.maximum(last, tl.max(tl.where(seen, before + i[None, :], -1), 1))
            total += tl.load(
                updates_ptr + last * updates_stride_t + VALUE_DIM, mask=last >= 0, other=0.0
            )

        # Differences along a path, the mask first: between other rows they may be positive.
        decay = tl.exp(tl.where(sees, total[:, None] - total[None, :], float("-inf")))
        kept = tl.exp(total)
        right = v - _state_product(k, state, PRECISION) * (kept * k_norm)[:, None]
        out = _state_product(q, state, PRECISION) * (kept * q_norm)[:, None]
        if BLOCKS:
            for before in range(0, first, BLOCK_M):
                earlier = before + i
                seen = _on_path(
                    row_masks_ptr, mask_stride, num_words, node, in_tree, before, BLOCK_M
                )
                there = earlier < tail_len
                k_before = _load_rows(key_ptr, earlier, qkv_stride, there, dim, in_dim)
                of_row = updates_ptr + earlier * updates_stride_t
                u_before = tl.load(of_row[:, None] + column[None, :], mask=in_columns[None, :])
                total_before = tl.load(of_row + VALUE_DIM)
                weight = tl.where(seen, total[:, None] - total_before[None, :], float("-inf"))
                weight = tl.exp(weight) * _inverse_norm(k_before)[None, :]
                u_before = tl.where(in_columns[None, :], u_before, 0.0)
                by_key = weight * tl.dot(k, tl.trans(k_before), input_precision="ieee")
                right -= k_norm[:, None] * tl.dot(by_key, u_before, input_precision=PRECISION)
                by_query = weight * tl.dot(q, tl.trans(k_before), input_precision="ieee")
                out += q_norm[:, None] * tl.dot(by_query, u_before, input_precision=PRECISION)

        weight = decay * k_norm[None, :]
        m = weight * (beta * k_norm)[:, None] * tl.dot(k, tl.trans(k), input_precision="ieee")
        m = tl.where(i[:, None] == i[None, :], 0.0, m)
        u = _solve(m, level, right * beta[:, None], BLOCK_M, HALVINGS, PRECISION)
        if BLOCKS:
            # Every program of a head stores the same totals, and reads what it stored itself.
            of_row = updates_ptr + node * updates_stride_t
            tl.store(
                of_row[:, None] + column[None, :], u, mask=in_tree[:, None] & in_columns[None, :]
            )
            tl.store(of_row + VALUE_DIM, total, mask=in_tree)
            tl.debug_barrier()
        weight *= q_norm[:, None] * tl.dot(q, tl.trans(k), input_precision="ieee")
        out += tl.dot(weight, u, input_precision=PRECISION)
        tl.store(
            out_ptr + node[:, None] * out_stride_t + column[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=in_tree[:, None] & in_columns[None, :],
        )


@triton.jit
def _load_rows(base_ptr, node, stride, in_tree, column, in_columns):
    """[rows, columns] in the rows' dtype, 0 outside."""
    return tl.load(
        base_ptr + node[:, None] * stride + column[None, :],
        mask=in_tree[:, None] & in_columns[None, :],
        other=0.0,
    )


@triton.jit
def _inverse_norm(x):
    """1 / sqrt(x . x + epsilon) of each row: products of raw bfloat16 rows are exact, and scaled
    afterwards."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _on_path(row_masks_ptr, stride, num_words, node, in_tree, first, BLOCK_M: tl.constexpr):
    """bool [BLOCK_M, BLOCK_M]: whether row first + l is on the path to row `node` of a tree."""
    l = tl.arange(0, BLOCK_M)
    word = first // 32
    low = tl.load(row_masks_ptr + node * stride + word, mask=in_tree, other=0)[:, None]
    if BLOCK_M > 32:
        high = tl.zeros([BLOCK_M], tl.int32)
        if word + 1 < num_words:
            high = tl.load(row_masks_ptr + node * stride + word + 1, mask=in_tree, other=0)
        low = tl.where(l[None, :] < 32, low, high[:, None])
    return ((low >> ((first + l) % 32)[None, :]) & 1) != 0


@triton.jit
def _state_product(rows, state, PRECISION: tl.constexpr):
    """rows [M, K] times the transpose of the float32 state [V, K]."""
    if rows.dtype == tl.bfloat16:
        # The state in two parts: as bfloat16 alone it would lose what a float32 cache is for.
        high = state.to(tl.bfloat16)
        low = (state - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(rows, tl.trans(low), tl.dot(rows, tl.trans(high)))
    else:
        return tl.dot(rows.to(tl.float32), tl.trans(state), input_precision=PRECISION)


@triton.jit
def _solve(
    m,  # [BLOCK_M, BLOCK_M]
    level,  # [BLOCK_M]
    right,  # [BLOCK_M, V]
    BLOCK_M: tl.constexpr,
    HALVINGS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(I + m)^-1 right, where m leads from rows of lower levels to rows of higher ones."""
    i = tl.arange(0, BLOCK_M)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - _between_halves(m, level, 0)
    for s in tl.static_range(1, HALVINGS - 1):
        between = tl.dot(inverse, _between_halves(m, level, s), input_precision=PRECISION)
        inverse -= tl.dot(between, inverse, input_precision=PRECISION)
    # The last step on the right side itself.
    u = tl.dot(inverse, right, input_precision=PRECISION)
    up = tl.dot(_between_halves(m, level, HALVINGS - 1), u, input_precision=PRECISION)
    return u - tl.dot(inverse, up, input_precision=PRECISION)


@triton.jit
def _between_halves(m, level, s: tl.constexpr):
    """The part of m from the lower to the upper 2^s levels of each group of 2^(s + 1)."""
    half = level >> s
    is_upper = (half & 1) == 1
    return tl.where(is_upper[:, None] & (half[None, :] == half[:, None] - 1), m, 0.0)
