# SPDX-License-Identifier: Apache-2.0
"""Tree attention on FlashAttention: its own kernel for the prefix, ours for the tail.

The prefix needs no mask, so FlashAttention reads it with `causal=False` and gives the log-sum-exp;
one small kernel adds the ancestors and merges. One extra launch a layer.

In a layer with a sliding window the rows' prefixes start at different keys, each by its depth;
FlashAttention's own window moves by one key a row, so our Triton kernel reads those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from vllm_ddtree.attention.forward.plain import tree_forward
from vllm_ddtree.attention.forward.triton_prefix import triton_prefix_pass
from vllm_ddtree.attention.kernels.scales import Scales
from vllm_ddtree.attention.layer import Variant
from vllm_ddtree.attention.metadata.plain import TreeMetadata

if TYPE_CHECKING:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata


class TreeFlashAttentionImpl(FlashAttentionImpl):
    """FlashAttention for prefixes (our Triton kernel with a sliding window) and for rows outside
    trees, our Triton kernel for the tail."""

    vllm_impl = FlashAttentionImpl
    tree_variant = Variant()  # the layer's own takes its place
    plain_forward = FlashAttentionImpl.forward
    forward = tree_forward

    def prefix_pass(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        tree: TreeMetadata,
        output: torch.Tensor,
        scales: Scales | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `tree_forward`."""
        if self.tree_variant.window:
            return triton_prefix_pass(
                self, query, key_cache, value_cache, attn_metadata, tree, output, scales
            )
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q=query,
            k=_canonical(key_cache),
            v=_canonical(value_cache),
            # Tree rows may use the output as scratch only if nothing else has written there.
            out=torch.empty_like(output) if tree.has_plain_rows else output,
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len,
            seqused_k=tree.prefix_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=False,
            softcap=self.tree_variant.soft_cap,
            block_table=attn_metadata.block_table,
            return_softmax_lse=True,
            # Of a mixed batch the metadata plan the causal pass; FlashAttention plans this itself.
            scheduler_metadata=(None if tree.has_plain_rows else attn_metadata.scheduler_metadata),
            fa_version=self.vllm_flash_attn_version,
            num_splits=attn_metadata.max_num_splits,
            **_descales(scales, query, tree.prefix_lens.shape[0]),
        )


def _descales(scales: Scales | None, query: torch.Tensor, num_reqs: int) -> dict[str, torch.Tensor]:
    """The scales as FlashAttention takes them: float32 [num_reqs, Hkv] each."""
    if scales is None:
        return {}
    descales = {
        "k_descale": scales.key.expand(num_reqs, -1),
        "v_descale": scales.value.expand(num_reqs, -1),
    }
    # FlashAttention 4 on Hopper takes queries in the model's dtype.
    if query.dtype != scales.dtype:
        descales["q_descale"] = scales.query.expand(num_reqs, -1)
    return descales


def _canonical(cache: torch.Tensor) -> torch.Tensor:
    """As vLLM does: strides of size-1 dims that the TMA of FlashAttention 3 accepts."""
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

    return canonicalize_singleton_dim_strides(cache)
