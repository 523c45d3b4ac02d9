# SPDX-License-Identifier: Apache-2.0
"""Tree attention on FlashAttention: its own kernel for the prefix, ours for the tail.

The prefix needs no mask, so FlashAttention reads it with `causal=False` and gives the log-sum-exp;
one small kernel adds the ancestors and merges. One extra launch a layer.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from vllm_ddtree.attention.tail import tail_attention

FORM = "FlashAttention prefix + Triton tail"


class TreeFlashAttentionImpl(FlashAttentionImpl):
    """FlashAttention for rows outside trees, prefix + tail for tree rows."""

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
        """See `FlashAttentionImpl.forward` (v1/attention/backends/flash_attn.py)."""
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

        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        n = attn_metadata.num_actual_tokens
        query, out = query[:n], output[:n]
        # (B, H, N, 2*D) -> ((B, N, H, D), (B, N, H, D))
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        key_cache, value_cache = _canonical(key_cache), _canonical(value_cache)
        # Tree rows may use the output as scratch only if nothing else has written there.
        prefix_out, prefix_lse = flash_attn_varlen_func(
            q=query,
            k=key_cache,
            v=value_cache,
            out=torch.empty_like(out) if tree.has_plain_rows else out,
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len,
            seqused_k=tree.prefix_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=False,
            block_table=attn_metadata.block_table,
            return_softmax_lse=True,
            # Of a mixed batch the metadata plan the causal pass; FlashAttention plans this one
            # itself.
            scheduler_metadata=(None if tree.has_plain_rows else attn_metadata.scheduler_metadata),
            fa_version=self.vllm_flash_attn_version,
            num_splits=attn_metadata.max_num_splits,
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


def _canonical(cache: torch.Tensor) -> torch.Tensor:
    """As vLLM does: strides of size-1 dims that the TMA of FlashAttention 3 accepts."""
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

    return canonicalize_singleton_dim_strides(cache)
