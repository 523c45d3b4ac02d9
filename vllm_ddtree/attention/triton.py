# SPDX-License-Identifier: Apache-2.0
"""Tree attention on vLLM's Triton backend: both passes are ours, so it runs on any GPU."""

import functools
from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm_ddtree.attention.prefix import choose_num_segments, prefix_attention
from vllm_ddtree.attention.tail import tail_attention

FORM = "Triton prefix + Triton tail"


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


class TreeTritonAttentionImpl(TritonAttentionImpl):
    """vLLM's Triton attention for rows outside trees, prefix + tail for tree rows."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,  # [T, Hq, Dh]
        key: torch.Tensor,  # [T, Hkv, Dh]
        value: torch.Tensor,  # [T, Hkv, Dh]
        kv_cache: torch.Tensor,  # [num_blocks, Hkv, block_size, 2 * Dh]
        attn_metadata: Any,
        output: torch.Tensor,  # [T, Hq, Dh]
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `TritonAttentionImpl.forward` (v1/attention/backends/triton_attn.py)."""
        tree = getattr(attn_metadata, "tree", None)
        if tree is None or tree.has_plain_rows:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if tree is None:
            return output
        n = attn_metadata.num_actual_tokens
        query, out = query[:n], output[:n]
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        segments = choose_num_segments(
            attn_metadata.block_table.shape[0],
            self.num_kv_heads,
            tree.max_tail,
            self.num_queries_per_kv,
            _num_sms(out.device),
        )
        # Inside a FULL graph these come from the graph's own pool.
        prefix_out = out.new_empty(segments, *out.shape, dtype=torch.float32)
        prefix_lse = out.new_empty(segments, self.num_heads, n, dtype=torch.float32)
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
        )
        fresh = key is not None
        tail_attention(
            query,
            key[:n] if fresh else key_cache,
            value[:n] if fresh else value_cache,
            tree.masks[:n],
            attn_metadata.query_start_loc,
            tree.tail_lens,
            prefix_out,
            prefix_lse,
            out,
            self.scale,
            tree.max_tail,
            slot_mapping=None if fresh else attn_metadata.slot_mapping,
            small_tiles=not tree.in_graph,
        )
        return output
