# SPDX-License-Identifier: Apache-2.0
"""The short convolution of tree rows: taps along the path, then the committed inputs.

Follows vLLM's `causal_conv1d_update` (model_executor/layers/mamba/ops/causal_conv1d.py) in what it
computes and how it rounds, so that a row's output does not depend on the tree around it. The
committed inputs are not touched: the commit moves them on once the path is known, and therefore the
rows' inputs are stashed.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.recurrent.rows import RecurrentRows


def tree_conv(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    state_indices: torch.Tensor,
    rows: RecurrentRows,
    query_start_loc: torch.Tensor,
    tail_lens: torch.Tensor,
    out: torch.Tensor,
    stash: torch.Tensor,
    max_tail: int,
    silu: bool = True,
) -> None:
    """Write convolution outputs and the stash of the tree rows; rows outside trees stay.

    Args:
        inputs: [T, C], the rows' projections, contiguous in C.
        weight: [C, W], oldest tap first.
        bias: [C] or None.
        conv_states: [N, C, at least W - 1], any strides; the W - 1 committed inputs come first,
            oldest first.
        state_indices: int32 [at least R], row of `conv_states` of each request; vLLM's null block
            (0) has no state, and its request is skipped.
        rows: `starts` and `taps` of this step.
        query_start_loc: int32 [R + 1].
        tail_lens: int32 [at least R], tree rows at the end of each request, 0 without a tree.
        out: [T, C], not `inputs`: rows read each other's.
        stash: [max_tree_rows, C], receives the tree rows' inputs.
        max_tail: upper bound of `tail_lens`.
        silu: whether SiLU follows.

    Raises:
        ValueError: dtypes differ, C is not contiguous, or the convolution has another width.

    """
    if weight.shape[1] != rows.width:
        raise ValueError(f"the rows have taps for a width of {rows.width}, got {weight.shape[1]}")
    if {t.dtype for t in (inputs, conv_states, out, stash)} != {inputs.dtype}:
        raise ValueError("inputs, committed inputs, outputs and stash must have one dtype")
    if {t.stride(-1) for t in (inputs, weight, out, stash)} != {1}:
        raise ValueError("tensors must be contiguous in their last dimension")
    num_channels = inputs.shape[1]
    block_c = min(256, triton.next_power_of_2(num_channels))
    block_t = min(8, triton.next_power_of_2(max_tail))
    grid = (
        query_start_loc.shape[0] - 1,
        triton.cdiv(max_tail, block_t),
        triton.cdiv(num_channels, block_c),
    )
    _tree_conv_kernel[grid](
        inputs,
        weight,
        bias,
        conv_states,
        state_indices,
        rows.starts,
        rows.taps,
        query_start_loc,
        tail_lens,
        out,
        stash,
        inputs.stride(0),
        weight.stride(0),
        *conv_states.stride(),
        out.stride(0),
        stash.stride(0),
        NUM_CHANNELS=num_channels,
        WIDTH=rows.width,
        BIAS=bias is not None,
        SILU=silu,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        num_warps=4,
    )


@triton.jit
def rounded_product(x, weight):
    """x * weight in float32, rounded to x's dtype on the way, as vLLM's kernels multiply."""
    return (x.to(tl.float32) * weight.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _tree_conv_kernel(
    inputs_ptr,  # [T, NUM_CHANNELS]
    weight_ptr,  # [NUM_CHANNELS, WIDTH]
    bias_ptr,  # [NUM_CHANNELS] if BIAS
    conv_states_ptr,  # [N, NUM_CHANNELS, WIDTH - 1 or more]
    state_indices_ptr,  # [R]
    starts_ptr,  # [R]
    taps_ptr,  # [max_tree_rows, WIDTH - 1]
    query_start_loc_ptr,  # [R + 1]
    tail_lens_ptr,  # [R]
    out_ptr,  # [T, NUM_CHANNELS]
    stash_ptr,  # [max_tree_rows, NUM_CHANNELS]
    inputs_stride,
    weight_stride,
    state_stride_n,
    state_stride_c,
    state_stride_t,
    out_stride,
    stash_stride,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    req = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_T
    tail_len = tl.load(tail_lens_ptr + req)
    state_index = tl.load(state_indices_ptr + req).to(tl.int64)
    if (first >= tail_len) | (state_index <= 0):
        return

    node = first + tl.arange(0, BLOCK_T)
    in_tree = node < tail_len
    root = (tl.load(query_start_loc_ptr + req + 1) - tail_len).to(tl.int64)
    number = tl.load(starts_ptr + req).to(tl.int64) + node
    channel = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = channel < NUM_CHANNELS
    in_tile = in_tree[:, None] & there[None, :]
    inputs_ptr += root * inputs_stride
    conv_states_ptr += state_index * state_stride_n

    acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    own = tl.load(
        inputs_ptr + node[:, None] * inputs_stride + channel[None, :], mask=in_tile, other=0.0
    )
    for age in tl.static_range(WIDTH):
        tap: tl.constexpr = WIDTH - 1 - age  # oldest first, as vLLM adds
        if tap == 0:
            x = own
        else:
            at = tl.load(taps_ptr + number * (WIDTH - 1) + tap - 1, mask=in_tree, other=0)
            drafted = (at >= 0)[:, None]
            x = tl.load(
                inputs_ptr + at[:, None] * inputs_stride + channel[None, :],
                mask=in_tile & drafted,
                other=0.0,
            )
            committed = tl.load(
                conv_states_ptr
                + (WIDTH - 1 + at)[:, None] * state_stride_t
                + channel[None, :] * state_stride_c,
                mask=in_tile & ~drafted,
                other=0.0,
            )
            x = tl.where(drafted, x, committed)
        weight = tl.load(weight_ptr + channel * weight_stride + age, mask=there, other=0.0)
        acc += rounded_product(x, weight[None, :])
    if SILU:
        acc = acc / (1 + tl.exp(-acc))
    tl.store(
        out_ptr + (root + node)[:, None] * out_stride + channel[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=in_tile,
    )
    tl.store(stash_ptr + number[:, None] * stash_stride + channel[None, :], own, mask=in_tile)
