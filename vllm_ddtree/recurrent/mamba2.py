# SPDX-License-Identifier: Apache-2.0
"""Mamba2 over tree rows, all rows of a tree in one chunk.

`reference_mamba2.py` has the mathematics. As for gated delta net, no row has a recurrent state: a
program reads its part of the committed state once, and writes outputs; `commit.py` moves the state
on. Time steps and the decays' rounding follow vLLM's `selective_state_update`
(layers/mamba/ops/mamba_ssm.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.recurrent.checks import check_contiguous, check_masks
from vllm_ddtree.recurrent.inputs import add_selected
from vllm_ddtree.recurrent.layer import StateLayer
from vllm_ddtree.recurrent.products import load_rows, path_decay, product, state_product
from vllm_ddtree.recurrent.rows import TreeStep, on_path


@dataclass(frozen=True, kw_only=True)
class Mamba2Layer(StateLayer):
    """A Mamba2 layer. Its channels are x (values), B (keys) and C (queries), in this order.

    Key heads are the groups of heads that share B and C.
    """

    A: torch.Tensor
    """float32 [Hv], negative."""
    dt_bias: torch.Tensor
    """[Hv]."""
    D: torch.Tensor
    """[Hv]."""
    corrects: ClassVar[bool] = False

    @property
    def key_start(self) -> int:
        """First channel of the keys (B)."""
        return self.num_heads * self.value_dim

    @property
    def value_start(self) -> int:
        """First channel of the values (x)."""
        return 0

    @property
    def query_start(self) -> int:
        """First channel of the queries (C)."""
        return self.key_start + self.num_key_heads * self.key_dim


def mamba2_gates(
    layer: Mamba2Layer, step: TreeStep, raw: torch.Tensor, gates: torch.Tensor
) -> None:
    """Write log decays, time steps, and the decays' sums along paths.

    Args:
        layer: the layer.
        step: the tree rows.
        raw: [T, Hv], projections to time steps.
        gates: float32 [max_tree_rows, 3, Hv], of the layer's stash.

    Raises:
        ValueError: a tensor is not contiguous in its last dimension.

    """
    check_contiguous(raw, gates, step.masks)
    block_m = step.block_rows
    block_h = min(32, max(16, triton.next_power_of_2(layer.num_heads)))
    grid = (
        triton.cdiv(step.max_tail, block_m),
        triton.cdiv(layer.num_heads, block_h),
        step.num_reqs,
    )
    _gates_kernel[grid](
        raw,
        layer.A,
        layer.dt_bias,
        step.masks,
        step.state_indices,
        step.rows.starts,
        step.query_start_loc,
        step.tail_lens,
        gates,
        raw.stride(0),
        step.masks.stride(0),
        step.masks.shape[1],
        *gates.stride()[:2],
        NUM_HEADS=layer.num_heads,
        BLOCK_H=block_h,
        BLOCK_M=block_m,
        EXACT=raw.dtype == torch.float32,
        num_warps=4,
        num_stages=1,
    )


def tree_mamba2(
    layer: Mamba2Layer,
    step: TreeStep,
    inputs: torch.Tensor,
    gates: torch.Tensor,
    out: torch.Tensor,
    block_v: int | None = None,
) -> None:
    """Write outputs of the tree rows; rows outside trees stay as they are.

    Args:
        layer: the committed states, which are read only.
        step: the tree rows.
        inputs: [T, C], x, B and C after the convolution.
        gates: float32 [max_tree_rows, 3, Hv], from `mamba2_gates`.
        out: [T, Hv, V].
        block_v: value columns of a program.

    Raises:
        ValueError: a tensor is not contiguous in its last dimension, or the masks have fewer than
            `step.max_tail` bits.

    """
    check_contiguous(inputs, step.masks, out, gates)
    check_masks(step)
    block_m = step.block_rows
    if block_v is None:
        block_v = min(64, max(16, triton.next_power_of_2(layer.value_dim)))
    grid = (
        triton.cdiv(layer.value_dim, block_v) * triton.cdiv(step.max_tail, block_m),
        layer.num_heads,
        step.num_reqs,
    )
    _tree_mamba2_kernel[grid](
        inputs,
        layer.states,
        layer.D,
        step.state_indices,
        step.rows.starts,
        step.masks,
        step.query_start_loc,
        step.tail_lens,
        gates,
        out,
        inputs.stride(0),
        *layer.states.stride()[:3],
        step.masks.stride(0),
        step.masks.shape[1],
        *gates.stride()[:2],
        *out.stride()[:2],
        GROUP=layer.num_heads // layer.num_key_heads,
        KEY_START=layer.key_start,
        QUERY_START=layer.query_start,
        KEY_DIM=layer.key_dim,
        VALUE_DIM=layer.value_dim,
        BLOCK_K=max(16, triton.next_power_of_2(layer.key_dim)),
        BLOCK_V=block_v,
        BLOCKS_V=triton.cdiv(layer.value_dim, block_v),
        BLOCK_M=block_m,
        EXACT=inputs.dtype == torch.float32,
        num_warps=4 if layer.key_dim <= 128 else 8,
        num_stages=1,
    )


@triton.jit
def _gates_kernel(
    raw_ptr,  # [T, NUM_HEADS]
    A_ptr,  # [NUM_HEADS]
    dt_bias_ptr,  # [NUM_HEADS]
    masks_ptr,  # [T, num_words]
    state_indices_ptr,  # [R]
    starts_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    tail_lens_ptr,  # [R]
    gates_ptr,  # [max_tree_rows, 3, NUM_HEADS]
    raw_stride,
    mask_stride,
    num_words,
    gates_stride_t,
    gates_stride_g,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EXACT: tl.constexpr,  # whether products are float32's own
):
    first = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    req = tl.program_id(2)
    tail_len = tl.load(tail_lens_ptr + req)
    if (first >= tail_len) | (tl.load(state_indices_ptr + req) <= 0):
        return
    root = (tl.load(query_start_loc_ptr + req + 1) - tail_len).to(tl.int64)
    raw_ptr += root * raw_stride
    masks_ptr += root * mask_stride
    gates_ptr += tl.load(starts_ptr + req).to(tl.int64) * gates_stride_t

    i = tl.arange(0, BLOCK_M)
    in_heads = head < NUM_HEADS
    rate = tl.load(A_ptr + head, mask=in_heads, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head, mask=in_heads, other=0.0).to(tl.float32)
    node = first + i
    in_tree = node < tail_len
    total = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    dt = total
    for before in range(0, first + BLOCK_M, BLOCK_M):
        row = before + i
        x = load_rows(raw_ptr, row, raw_stride, row < tail_len, head, in_heads).to(tl.float32)
        x += dt_bias[None, :]
        dt = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
        sees = on_path(masks_ptr, mask_stride, num_words, node, in_tree, before, BLOCK_M)
        total = add_selected(total, sees, rate[None, :] * dt, EXACT)
    in_tile = in_tree[:, None] & in_heads[None, :]
    gates = gates_ptr + node[:, None] * gates_stride_t + head[None, :]
    # The last of the blocks is the rows' own.
    tl.store(gates, rate[None, :] * dt, mask=in_tile)
    tl.store(gates + gates_stride_g, dt, mask=in_tile)
    tl.store(gates + 2 * gates_stride_g, total, mask=in_tile)


@triton.jit
def _tree_mamba2_kernel(
    inputs_ptr,  # [T, Hv * VALUE_DIM + 2 * Hk * KEY_DIM]
    states_ptr,  # [N, Hv, VALUE_DIM, KEY_DIM]
    D_ptr,  # [Hv]
    state_indices_ptr,  # [R]
    starts_ptr,  # [R]
    masks_ptr,  # [T, num_words]
    query_start_loc_ptr,  # [R + 1]
    tail_lens_ptr,  # [R]
    gates_ptr,  # [max_tree_rows, 3, Hv]
    out_ptr,  # [T, Hv, VALUE_DIM]
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
    GROUP: tl.constexpr,
    KEY_START: tl.constexpr,
    QUERY_START: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCKS_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EXACT: tl.constexpr,  # whether products are float32's own
):
    column = tl.program_id(0) % BLOCKS_V * BLOCK_V + tl.arange(0, BLOCK_V)
    first = tl.program_id(0) // BLOCKS_V * BLOCK_M
    head = tl.program_id(1)
    req = tl.program_id(2)
    tail_len = tl.load(tail_lens_ptr + req)
    state_index = tl.load(state_indices_ptr + req).to(tl.int64)
    if (first >= tail_len) | (state_index <= 0):
        return

    root = (tl.load(query_start_loc_ptr + req + 1) - tail_len).to(tl.int64)
    start = tl.load(starts_ptr + req).to(tl.int64)
    inputs_ptr += root * inputs_stride
    query_ptr = inputs_ptr + QUERY_START + head // GROUP * KEY_DIM
    key_ptr = inputs_ptr + KEY_START + head // GROUP * KEY_DIM
    value_ptr = inputs_ptr + head * VALUE_DIM
    masks_ptr += root * mask_stride
    dt_ptr = gates_ptr + start * gates_stride_t + gates_stride_g + head
    total_ptr = dt_ptr + gates_stride_g
    out_ptr += root * out_stride_t + head * out_stride_h

    dim = tl.arange(0, BLOCK_K)
    in_dim = dim < KEY_DIM
    in_columns = column < VALUE_DIM
    i = tl.arange(0, BLOCK_M)
    node = first + i
    in_tree = node < tail_len
    c = load_rows(query_ptr, node, inputs_stride, in_tree, dim, in_dim)
    total = tl.load(total_ptr + node * gates_stride_t, mask=in_tree, other=0.0)
    state_ptr = states_ptr + state_index * state_stride_n + head * state_stride_h
    state = load_rows(state_ptr, column, state_stride_v, in_columns, dim, in_dim).to(tl.float32)
    out = state_product(c, state, EXACT) * tl.exp(total)[:, None]
    x = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for before in range(0, first + BLOCK_M, BLOCK_M):
        row = before + i
        there = row < tail_len
        b = load_rows(key_ptr, row, inputs_stride, there, dim, in_dim)
        x = load_rows(value_ptr, row, inputs_stride, there, column, in_columns).to(tl.float32)
        dt = tl.load(dt_ptr + row * gates_stride_t, mask=there, other=0.0)
        total_before = tl.load(total_ptr + row * gates_stride_t, mask=there, other=0.0)
        sees = on_path(masks_ptr, mask_stride, num_words, node, in_tree, before, BLOCK_M)
        decay = path_decay(sees & there[None, :], total, total_before) * dt[None, :]
        p = decay * tl.dot(c, tl.trans(b), input_precision="ieee")
        out += product(p, x, EXACT)
    # The last of the blocks is the rows' own.
    out += tl.load(D_ptr + head).to(tl.float32) * x
    tl.store(
        out_ptr + node[:, None] * out_stride_t + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=in_tree[:, None] & in_columns[None, :],
    )
