# SPDX-License-Identifier: Apache-2.0
"""The short convolution of tree rows alone, for layers whose gates are made elsewhere."""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.recurrent.checks import check_convolution
from vllm_ddtree.recurrent.inputs import convolve_rows
from vllm_ddtree.recurrent.layer import StateLayer
from vllm_ddtree.recurrent.rows import TreeStep


def tree_convolution(
    layer: StateLayer,
    step: TreeStep,
    inputs: torch.Tensor,
    out: torch.Tensor,
    stash: torch.Tensor,
) -> None:
    """Write convolution outputs of the tree rows; rows outside trees stay as they are.

    Args:
        layer: weights, and the committed inputs, which are read only.
        step: the tree rows.
        inputs: [T, C].
        out: [T, C], not `inputs`: rows read each other's.
        stash: [max_tree_rows, C], receives the inputs of the tree rows.

    Raises:
        ValueError: dtypes differ, a tensor is not contiguous in its last dimension, or `step` was
            prepared for another width.

    """
    check_convolution(layer, step, inputs, out, stash)
    block_c = min(256, triton.next_power_of_2(layer.num_channels))
    block_t = min(8, triton.next_power_of_2(step.max_tail))
    grid = (
        triton.cdiv(layer.num_channels, block_c),
        triton.cdiv(step.max_tail, block_t),
        step.num_reqs,
    )
    _tree_convolution_kernel[grid](
        inputs,
        layer.conv_weight,
        layer.conv_bias,
        layer.conv_states,
        step.state_indices,
        step.rows.starts,
        step.rows.taps,
        step.query_start_loc,
        step.tail_lens,
        out,
        stash,
        inputs.stride(0),
        layer.conv_weight.stride(0),
        *layer.conv_states.stride(),
        out.stride(0),
        stash.stride(0),
        NUM_CHANNELS=layer.num_channels,
        WIDTH=layer.width,
        BIAS=layer.conv_bias is not None,
        SILU=layer.silu,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        num_warps=4,
        num_stages=1,
    )


@triton.jit
def _tree_convolution_kernel(
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
    first = tl.program_id(1) * BLOCK_T
    req = tl.program_id(2)
    tail_len = tl.load(tail_lens_ptr + req)
    state_index = tl.load(state_indices_ptr + req).to(tl.int64)
    if (first >= tail_len) | (state_index <= 0):
        return
    root = (tl.load(query_start_loc_ptr + req + 1) - tail_len).to(tl.int64)
    start = tl.load(starts_ptr + req).to(tl.int64)
    convolve_rows(
        inputs_ptr + root * inputs_stride,
        weight_ptr,
        bias_ptr,
        conv_states_ptr + state_index * state_stride_n,
        taps_ptr + start * (WIDTH - 1),
        out_ptr + root * out_stride,
        stash_ptr + start * stash_stride,
        inputs_stride,
        weight_stride,
        state_stride_c,
        state_stride_t,
        out_stride,
        stash_stride,
        first,
        tail_len,
        NUM_CHANNELS,
        WIDTH,
        BIAS,
        SILU,
        BLOCK_T,
        BLOCK_C,
    )
