# SPDX-License-Identifier: Apache-2.0
"""The prefix pass by our own kernels, with the buffers they write to."""

from __future__ import annotations

from typing import Any

import torch
from vllm.triton_utils import triton

from vllm_ddtree.attention.kernels.latent_prefix import latent_prefix, latent_segments, tile_rows
from vllm_ddtree.attention.kernels.launch import num_sms
from vllm_ddtree.attention.kernels.prefix import choose_num_segments, prefix_attention
from vllm_ddtree.attention.kernels.scales import Scales
from vllm_ddtree.attention.metadata.latent import Tail
from vllm_ddtree.attention.metadata.plain import TreeMetadata


def window_segments(window: int) -> int:
    """Segments that a sliding window is worth: 128 keys each, at most 16; a power of two."""
    return min(16, triton.next_power_of_2(triton.cdiv(window, 128)))


def _num_segments(self: Any, num_reqs: int, tree: TreeMetadata, device: torch.device) -> int:
    """Key segments of an implementation's prefix pass."""
    window = self.tree_variant.window
    most = window_segments(window) if window else 16
    if window and not tree.in_graph:
        # Outside a graph batches of every size come, and each number of segments makes another
        # tail kernel, compiled in front of a waiting request.
        return min(4, most)
    return choose_num_segments(
        num_reqs,
        self.num_kv_heads,
        tree.max_tail,
        self.num_queries_per_kv,
        num_sms(device),
        most,
    )


def triton_prefix_pass(
    self: Any,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    attn_metadata: Any,
    tree: TreeMetadata,
    output: torch.Tensor,
    scales: Scales | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`prefix_pass` of any implementation of plain attention (see `tree_forward`)."""
    variant = self.tree_variant
    segments = _num_segments(self, attn_metadata.block_table.shape[0], tree, output.device)
    # Inside a FULL graph these come from the graph's own pool.
    shape = (segments, self.num_heads, query.shape[0])
    prefix_out = output.new_empty(segments, *output.shape, dtype=torch.float32)
    prefix_lse = output.new_empty(shape, dtype=torch.float32)
    prefix_attention(
        query,
        key_cache,
        value_cache,
        attn_metadata.block_table,
        attn_metadata.query_start_loc,
        tree.tail_lens,
        tree.prefix_lens,
        prefix_out,
        prefix_lse,
        self.scale,
        tree.max_tail,
        tree.positions,
        variant.window,
        variant.soft_cap,
        scales,
    )
    return prefix_out, prefix_lse


def triton_latent_prefix_pass(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    tail: Tail,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prefix pass of latent attention, arguments as those of `latent_attention`.

    Its output is float32, so that it is rounded once, with the tail, as in vLLM's decode kernel.

    Returns:
        What `PrefixPass` gives.

    """
    rows, heads, rank = query.shape
    num_reqs, packed = block_table.shape[0], tail.max_len * heads
    block_m = tile_rows(packed, cache.shape[-1] * query.element_size(), query.device)
    segments = latent_segments(num_reqs, packed, block_m, num_sms(query.device))
    # Inside a FULL graph these come from the graph's own pool.
    prefix_out = query.new_empty(segments, rows, heads, rank, dtype=torch.float32)
    prefix_lse = query.new_empty(segments, heads, rows, dtype=torch.float32)
    latent_prefix(
        query,
        query_rope,
        cache,
        block_table,
        tail.ends,
        tail.lens,
        tail.prefix_lens,
        prefix_out,
        prefix_lse,
        scale,
        tail.max_len,
        block_m,
        cache_scale,
    )
    return prefix_out, prefix_lse
