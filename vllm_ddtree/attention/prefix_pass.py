# SPDX-License-Identifier: Apache-2.0
"""Our prefix kernel as a backend's prefix pass, with the buffers it writes to."""

import functools
from typing import Any

import torch
from vllm.triton_utils import triton

from vllm_ddtree.attention.kernels.prefix import choose_num_segments, prefix_attention
from vllm_ddtree.attention.metadata import TreeMetadata
from vllm_ddtree.attention.scales import Scales

FORM = "Triton prefix + Triton tail"


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


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


def triton_prefix(
    self: Any,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    attn_metadata: Any,
    tree: TreeMetadata,
    output: torch.Tensor,
    scales: Scales | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tree_prefix` of any implementation (see `tree_forward`)."""
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
