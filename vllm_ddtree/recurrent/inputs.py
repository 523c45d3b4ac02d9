# SPDX-License-Identifier: Apache-2.0
"""What the delta rule of tree rows takes: convolution outputs and gates, in one launch a layer.

The short convolution of a row reads the inputs of its nearest ancestors, then committed inputs.
Convolution and gates follow vLLM's `causal_conv1d_update` (layers/mamba/ops/causal_conv1d.py) and
`fused_sigmoid_gating` (third_party/flash_linear_attention/ops) in what they compute and how they
round, so that a row's values do not depend on the tree around it. The committed inputs are not
touched: the commit moves them on once the path is known. For that the rows' inputs are stashed.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton

from vllm_ddtree.recurrent.checks import check_contiguous, check_convolution
from vllm_ddtree.recurrent.layer import RecurrentLayer
from vllm_ddtree.recurrent.rows import TreeStep, on_path
from vllm_ddtree.recurrent.stash import LayerStash


def tree_inputs(
    layer: RecurrentLayer,
    step: TreeStep,
    inputs: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    stash: LayerStash,
) -> None:
    """Write convolution outputs and stash of the tree rows; rows outside trees stay as they are.

    Args:
        layer: weights, and the committed inputs, which are read only.
        step: the tree rows.
        inputs: [T, C], projections to queries, keys and values.
        a, b: [T, Hv], projections to decay and beta.
        out: [T, C], not `inputs`: rows read each other's.
        stash: receives inputs and gates of the tree rows.

    Raises:
        ValueError: dtypes differ, a tensor is not contiguous in its last dimension, or `step` was
            prepared for another width.

    """
    check_convolution(layer, step, inputs, out, stash.inputs)
    check_contiguous(a, b, stash.gates)
    block_c = min(256, triton.next_power_of_2(layer.num_channels))
    block_t = min(8, triton.next_power_of_2(step.max_tail))
    channel_blocks = triton.cdiv(layer.num_channels, block_c)
    # One block more than there are: it makes the gates.
    grid = (channel_blocks + 1, triton.cdiv(step.max_tail, block_t), step.num_reqs)
    _tree_inputs_kernel[grid](
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
        stash.inputs,
        a,
        b,
        layer.A_log,
        layer.dt_bias,
        step.masks,
        stash.gates,
        inputs.stride(0),
        layer.conv_weight.stride(0),
        *layer.conv_states.stride(),
        out.stride(0),
        stash.inputs.stride(0),
        a.stride(0),
        b.stride(0),
        step.masks.stride(0),
        step.masks.shape[1],
        *stash.gates.stride()[:2],
        NUM_CHANNELS=layer.num_channels,
        WIDTH=layer.width,
        BIAS=layer.conv_bias is not None,
        SILU=layer.silu,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        NUM_HEADS=layer.num_heads,
        BLOCK_H=max(16, triton.next_power_of_2(layer.num_heads)),
        BLOCK_M=step.block_rows,
        BLOCKS=step.max_tail > step.block_rows,
        EXACT=a.dtype == torch.float32,
        OVERLAP=current_platform.is_arch_support_pdl(),
        num_warps=4,
        num_stages=1,
    )


@triton.jit
def _tree_inputs_kernel(
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
    a_ptr,  # [T, NUM_HEADS]
    b_ptr,  # [T, NUM_HEADS]
    A_log_ptr,  # [NUM_HEADS]
    dt_bias_ptr,  # [NUM_HEADS]
    masks_ptr,  # [T, num_words]
    gates_ptr,  # [max_tree_rows, 3, NUM_HEADS]
    inputs_stride,
    weight_stride,
    state_stride_n,
    state_stride_c,
    state_stride_t,
    out_stride,
    stash_stride,
    a_stride,
    b_stride,
    mask_stride,
    num_words,
    gates_stride_t,
    gates_stride_g,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,  # whether a tree may have more than BLOCK_M rows
    EXACT: tl.constexpr,  # whether products are float32's own
    OVERLAP: tl.constexpr,  # whether the verify kernel may start beside this one
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(1) * BLOCK_T
    req = tl.program_id(2)
    tail_len = tl.load(tail_lens_ptr + req)
    state_index = tl.load(state_indices_ptr + req).to(tl.int64)
    if (first >= tail_len) | (state_index <= 0):
        return
    root = (tl.load(query_start_loc_ptr + req + 1) - tail_len).to(tl.int64)
    start = tl.load(starts_ptr + req).to(tl.int64)

    if tl.program_id(0) == tl.num_programs(0) - 1:
        if first == 0:
            _gates(
                a_ptr + root * a_stride,
                b_ptr + root * b_stride,
                A_log_ptr,
                dt_bias_ptr,
                masks_ptr + root * mask_stride,
                gates_ptr + start * gates_stride_t,
                a_stride,
                b_stride,
                mask_stride,
                num_words,
                gates_stride_t,
                gates_stride_g,
                tail_len,
                NUM_HEADS,
                BLOCK_H,
                BLOCK_M,
                BLOCKS,
                EXACT,
            )
        return

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


@triton.jit
def convolve_rows(
    inputs_ptr,  # from here on: the request's own rows
    weight_ptr,
    bias_ptr,
    conv_states_ptr,  # of the request
    taps_ptr,
    out_ptr,
    stash_ptr,
    inputs_stride,
    weight_stride,
    state_stride_c,
    state_stride_t,
    out_stride,
    stash_stride,
    first,
    tail_len,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program's channels of the tree rows from `first` on; stashes their inputs."""
    node = first + tl.arange(0, BLOCK_T)
    in_tree = node < tail_len
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = channel < NUM_CHANNELS
    in_tile = in_tree[:, None] & there[None, :]
    taps_ptr += node * (WIDTH - 1)

    acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    own = tl.load(
        inputs_ptr + node[:, None] * inputs_stride + channel[None, :], mask=in_tile, other=0.0
    )
    for age in tl.static_range(WIDTH):
        # Oldest first, as vLLM adds.
        if age == WIDTH - 1:
            x = own
        else:
            at = tl.load(taps_ptr + WIDTH - 2 - age, mask=in_tree, other=0)
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
        out_ptr + node[:, None] * out_stride + channel[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=in_tile,
    )
    tl.store(stash_ptr + node[:, None] * stash_stride + channel[None, :], own, mask=in_tile)


@triton.jit
def rounded_product(x, weight):
    """x * weight in float32, rounded to x's dtype on the way, as vLLM's kernels multiply."""
    return (x.to(tl.float32) * weight.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _gates(
    a_ptr,  # from here on: the request's own rows
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    masks_ptr,
    gates_ptr,
    a_stride,
    b_stride,
    mask_stride,
    num_words,
    gates_stride_t,
    gates_stride_g,
    tail_len,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Log decays, betas, and the decays' sums along paths, of all heads."""
    i = tl.arange(0, BLOCK_M)
    head = tl.arange(0, BLOCK_H)
    in_heads = head < NUM_HEADS
    rate = -tl.exp(tl.load(A_log_ptr + head, mask=in_heads, other=0.0).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head, mask=in_heads, other=0.0).to(tl.float32)
    for first in range(0, tail_len if BLOCKS else 1, BLOCK_M):
        node = first + i
        in_tree = node < tail_len
        in_tile = in_tree[:, None] & in_heads[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        g = total
        for before in range(0, first + BLOCK_M, BLOCK_M):
            row = before + i
            x = tl.load(
                a_ptr + row[:, None] * a_stride + head[None, :],
                mask=(row < tail_len)[:, None] & in_heads[None, :],
                other=0.0,
            )
            x = x.to(tl.float32) + dt_bias[None, :]
            g = rate[None, :] * tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
            sees = on_path(masks_ptr, mask_stride, num_words, node, in_tree, before, BLOCK_M)
            total = add_selected(total, sees, g, EXACT)
        beta = tl.load(b_ptr + node[:, None] * b_stride + head[None, :], mask=in_tile, other=0.0)
        gates = gates_ptr + node[:, None] * gates_stride_t + head[None, :]
        # The last of the blocks is the rows' own.
        tl.store(gates, g, mask=in_tile)
        tl.store(gates + gates_stride_g, tl.sigmoid(beta.to(tl.float32)), mask=in_tile)
        tl.store(gates + 2 * gates_stride_g, total, mask=in_tile)


@triton.jit
def add_selected(total, sees, g, EXACT: tl.constexpr):
    """total + sees g, with all bits of the float32 g."""
    selected = tl.where(sees, 1.0, 0.0)
    if EXACT:
        return tl.dot(selected, g, total, input_precision="ieee")
    else:
        selected = selected.to(tl.bfloat16)
        for _ in tl.static_range(3):  # 8 bits each
            part = g.to(tl.bfloat16)
            g -= part.to(tl.float32)
            total = tl.dot(selected, part, total)
        return total
