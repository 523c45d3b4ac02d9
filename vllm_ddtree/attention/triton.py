# SPDX-License-Identifier: Apache-2.0
"""Tree attention on vLLM's Triton backend: both passes are ours, so it runs on any GPU."""

import functools
from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm_ddtree.attention.forward import tree_forward
from vllm_ddtree.attention.metadata import TreeMetadata
from vllm_ddtree.attention.prefix import choose_num_segments, prefix_attention

FORM = "Triton prefix + Triton tail"


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


class TreeTritonAttentionImpl(TritonAttentionImpl):
    """vLLM's Triton attention for rows outside trees."""

    plain_forward = TritonAttentionImpl.forward
    forward = tree_forward

    def tree_prefix(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        attn_metadata: Any,
        tree: TreeMetadata,
        output: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `tree_forward`."""
        segments = choose_num_segments(
            attn_metadata.block_table.shape[0],
            self.num_kv_heads,
            tree.max_tail,
            self.num_queries_per_kv,
            _num_sms(output.device),
        )
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
        )
        return prefix_out, prefix_lse
