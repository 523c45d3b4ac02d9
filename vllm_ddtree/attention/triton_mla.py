# SPDX-License-Identifier: Apache-2.0
"""Tree attention on vLLM's Triton backend for multi-head latent attention."""

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from vllm_ddtree import compat
from vllm_ddtree.attention.latent import FORM, latent_attention

__all__ = ["FORM", "TreeTritonMLAImpl"]


class TreeTritonMLAImpl(TritonMLAImpl):
    """vLLM's own prefill, and its decode kernel for batches of single rows."""

    def reserve_workspace(self) -> None:
        """Called where the engine profiles its memory (vLLM 0.33), as the builder does later."""
        config = self._vllm_config
        # vLLM's form counts a tree's rows a request, which never reach its kernel: with long
        # contexts that is more memory than there is.
        compat.reserve_mla_workspace(
            config, config.scheduler_config.max_num_seqs, self.num_heads, self.kv_lora_rank
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,  # [num_blocks, block_size, rank + rope], or fp8
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `MLACommonImpl.forward_mqa` (model_executor/layers/attention/mla_attention.py).

        q is [T, Hq, rank + rope], or its two parts; returns the output [T, Hq, rank].
        """
        if attn_metadata.tails is None:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        rank = self.kv_lora_rank
        query, rope = q if isinstance(q, tuple) else (q[..., :rank], q[..., rank:])
        fp8 = kv_c_and_k_pe_cache.dtype == current_platform.fp8_dtype()
        cache_scale = layer._k_scale if fp8 else None
        # Padding rows belong to no tail, and what they hold goes on through the model.
        out = query.new_zeros(*query.shape[:2], rank)
        for tail in attn_metadata.tails:
            latent_attention(
                query,
                rope,
                kv_c_and_k_pe_cache,
                attn_metadata.decode.block_table,
                attn_metadata.slot_mapping,
                tail,
                out,
                self.scale,
                cache_scale,
            )
        return out, None
