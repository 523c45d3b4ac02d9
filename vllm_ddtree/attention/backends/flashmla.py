# SPDX-License-Identifier: Apache-2.0
"""Tree attention on vLLM's FlashMLA backend for multi-head latent attention (Hopper).

FlashMLA's dense kernel takes as many rows of every request. Where all trees have one length, as in
every CUDA graph, it reads the prefix, and ours adds the tail. Elsewhere ours does both.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.mla.flashmla import FlashMLAImpl
from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache

from vllm_ddtree.attention.forward.latent import latent_forward
from vllm_ddtree.attention.forward.triton_prefix import triton_latent_prefix_pass
from vllm_ddtree.attention.metadata.builders import layer_runtime, named_after, of_one_length
from vllm_ddtree.attention.metadata.latent import Tail, latent_tree_builder

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.mla.flashmla import FlashMLAMetadata, FlashMLAMetadataBuilder


@functools.cache
def flashmla_builder(base: type[FlashMLAMetadataBuilder]) -> type[FlashMLAMetadataBuilder]:
    """`latent_tree_builder` whose metadata say whether the trees are of one length.

    `uniform_len` is that length, or 0 if they are not. The scheduler's part of the metadata is
    empty: the first layer fills it, inside the graph where there is one.
    """

    class TreeFlashMLAMetadataBuilder(latent_tree_builder(base)):  # type: ignore[misc]
        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            runtime = layer_runtime(self)
            uniform = of_one_length(runtime, common_attn_metadata)
            metadata.uniform_len = runtime.step.max_verify_len if uniform else 0
            return metadata

    return named_after(base, TreeFlashMLAMetadataBuilder)


class TreeFlashMLAImpl(FlashMLAImpl):
    """FlashMLA for prefixes of trees of one length (our Triton kernel for others) and for steps
    without trees, our Triton kernel for the tail, vLLM's own prefill."""

    vllm_impl = FlashMLAImpl
    tree_builder = staticmethod(flashmla_builder)
    plain_forward = FlashMLAImpl.forward_mqa
    forward_mqa = latent_forward

    def prefix_pass(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        cache: torch.Tensor,
        attn_metadata: FlashMLAMetadata,
        tail: Tail,
        out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `latent_forward`."""
        decode, length = attn_metadata.decode, attn_metadata.uniform_len
        table = decode.block_table
        if not length:
            return triton_latent_prefix_pass(query, query_rope, cache, table, tail, self.scale)
        num_reqs = table.shape[0]
        rows = slice(num_reqs * length)
        prefix_out, lse = flash_mla_with_kvcache(
            q=torch.cat([query[rows], query_rope[rows]], dim=-1).unflatten(0, (num_reqs, length)),
            k_cache=cache.unsqueeze(-2),
            block_table=table,
            cache_seqlens=tail.prefix_lens,
            head_dim_v=self.kv_lora_rank,
            tile_scheduler_metadata=decode.scheduler_metadata,
            softmax_scale=self.scale,
            causal=False,
            is_fp8_kvcache=False,
        )
        # [num_reqs, length, Hq, rank] and [num_reqs, Hq, length]
        return prefix_out.flatten(0, 1).unsqueeze(0), lse.transpose(0, 1).flatten(1).unsqueeze(0)
