# SPDX-License-Identifier: Apache-2.0
"""A Kimi-delta-attention layer, what it keeps of a step's tree rows, and its gates.

`reference_kda.py` has the mathematics, `kda_verify.py` the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.recurrent.checks import check_contiguous
from vllm_ddtree.recurrent.inputs import add_selected
from vllm_ddtree.recurrent.layer import StateLayer
from vllm_ddtree.recurrent.products import load_rows
from vllm_ddtree.recurrent.rows import TreeStep, on_path
from vllm_ddtree.recurrent.stash import Stash


@dataclass(frozen=True, kw_only=True)
class KDALayer(StateLayer):
    """A layer of Kimi delta attention; every head has a key head."""

    A_log: torch.Tensor
    """[H]."""
    dt_bias: torch.Tensor
    """[H, K]."""
    lower_bound: float | None = None
    """Of the decays' logarithms, where the model bounds them."""
    by_channel: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_key_heads != self.num_heads:
            raise ValueError(f"{self.num_heads} heads, but {self.num_key_heads} key heads")
        if self.dt_bias.shape != (self.num_heads, self.key_dim):
            raise ValueError(f"a bias of {tuple(self.dt_bias.shape)} for decays by key channel")


class KDAStash(Stash):
    """The stash of all layers; `gates` hold the log decays of each channel and beta, by head.

    Args:
        num_layers: recurrent layers.
        max_tree_rows: most tree rows of a step.
        num_channels: channels of the convolution.
        num_heads: heads.
        key_dim: key channels of a head.
        dtype: of the convolution's inputs.
        device: where it lies.

    """

    def __init__(
        self,
        num_layers: int,
        max_tree_rows: int,
        num_channels: int,
        num_heads: int,
        key_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(num_layers, max_tree_rows, num_channels, 0, dtype, device)
        shape = (num_layers, max_tree_rows, num_heads, key_dim + 1)
        self.gates = torch.zeros(*shape, dtype=torch.float32, device=device)
        """float32 [layers, max_tree_rows, H, K + 1]."""


def kda_gates(
    layer: KDALayer,
    step: TreeStep,
    raw: torch.Tensor,
    raw_beta: torch.Tensor,
    gates: torch.Tensor,
    totals: torch.Tensor,
) -> None:
    """Write log decays, betas, and the decays' sums along paths, of all channels.

    Args:
        layer: the layer.
        step: the tree rows.
        raw: [T, H * K], projections to decays.
        raw_beta: [T, H], projections to betas.
        gates: float32 [max_tree_rows, H, K + 1], of the layer's stash.
        totals: float32 [max_tree_rows, H, K], scratch; one serves all layers.

    Raises:
        ValueError: a tensor is not contiguous in its last dimension.

    """
    check_contiguous(raw, raw_beta, gates, totals, step.masks)
    block_m = step.block_rows
    block_k = min(32, max(16, triton.next_power_of_2(layer.key_dim)))
    blocks_k = triton.cdiv(layer.key_dim, block_k)
    grid = (triton.cdiv(step.max_tail, block_m) * blocks_k, layer.num_heads, step.num_reqs)
    _gates_kernel[grid](
        raw,
        raw_beta,
        layer.A_log,
        layer.dt_bias,
        step.masks,
        step.state_indices,
        step.rows.starts,
        step.query_start_loc,
        step.tail_lens,
        gates,
        totals,
        layer.lower_bound or 0.0,
        raw.stride(0),
        raw_beta.stride(0),
        layer.dt_bias.stride(0),
        step.masks.stride(0),
        step.masks.shape[1],
        *gates.stride()[:2],
        *totals.stride()[:2],
        KEY_DIM=layer.key_dim,
        BLOCK_K=block_k,
        BLOCKS_K=blocks_k,
        BLOCK_M=block_m,
        BOUNDED=layer.lower_bound is not None,
        EXACT=raw.dtype == torch.float32,
        num_warps=4,
        num_stages=1,
    )


@triton.jit
def _gates_kernel(
    raw_ptr,  # [T, H * KEY_DIM]
    raw_beta_ptr,  # [T, H]
    A_log_ptr,  # [H]
    dt_bias_ptr,  # [H, KEY_DIM]
    masks_ptr,  # [T, num_words]
    state_indices_ptr,  # [R]
    starts_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    tail_lens_ptr,  # [R]
    gates_ptr,  # [max_tree_rows, H, KEY_DIM + 1]
    totals_ptr,  # [max_tree_rows, H, KEY_DIM]
    lower_bound,
    raw_stride,
    raw_beta_stride,
    dt_bias_stride,
    mask_stride,
    num_words,
    gates_stride_t,
    gates_stride_h,
    totals_stride_t,
    totals_stride_h,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BOUNDED: tl.constexpr,
    EXACT: tl.constexpr,  # whether products are float32's own
):
    first = tl.program_id(0) // BLOCKS_K * BLOCK_M
    dim = tl.program_id(0) % BLOCKS_K * BLOCK_K + tl.arange(0, BLOCK_K)
    head = tl.program_id(1)
    req = tl.program_id(2)
    tail_len = tl.load(tail_lens_ptr + req)
    if (first >= tail_len) | (tl.load(state_indices_ptr + req) <= 0):
        return
    root = (tl.load(query_start_loc_ptr + req + 1) - tail_len).to(tl.int64)
    start = tl.load(starts_ptr + req).to(tl.int64)
    raw_ptr += root * raw_stride + head * KEY_DIM
    masks_ptr += root * mask_stride
    gates_ptr += start * gates_stride_t + head * gates_stride_h
    totals_ptr += start * totals_stride_t + head * totals_stride_h

    i = tl.arange(0, BLOCK_M)
    in_dim = dim < KEY_DIM
    rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head * dt_bias_stride + dim, mask=in_dim, other=0.0)
    node = first + i
    in_tree = node < tail_len
    total = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    g = total
    for before in range(0, first + BLOCK_M, BLOCK_M):
        row = before + i
        x = load_rows(raw_ptr, row, raw_stride, row < tail_len, dim, in_dim).to(tl.float32)
        x += dt_bias.to(tl.float32)[None, :]
        if BOUNDED:
            g = lower_bound * tl.sigmoid(rate * x)
        else:
            g = -rate * tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
        sees = on_path(masks_ptr, mask_stride, num_words, node, in_tree, before, BLOCK_M)
        total = add_selected(total, sees, g, EXACT)
    in_tile = in_tree[:, None] & in_dim[None, :]
    # The last of the blocks is the rows' own.
    tl.store(gates_ptr + node[:, None] * gates_stride_t + dim[None, :], g, mask=in_tile)
    tl.store(totals_ptr + node[:, None] * totals_stride_t + dim[None, :], total, mask=in_tile)
    if tl.program_id(0) % BLOCKS_K == 0:
        raw_beta_ptr += root * raw_beta_stride + head
        beta = tl.load(raw_beta_ptr + node * raw_beta_stride, mask=in_tree, other=0.0)
        beta = tl.sigmoid(beta.to(tl.float32))
        tl.store(gates_ptr + node * gates_stride_t + KEY_DIM, beta, mask=in_tree)
