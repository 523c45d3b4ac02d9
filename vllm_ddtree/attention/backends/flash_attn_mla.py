# SPDX-License-Identifier: Apache-2.0
"""Tree attention on vLLM's FlashAttention 3 backend for multi-head latent attention (Hopper).

As `flash_attn.py`: FlashAttention's own kernel reads the prefix with `causal=False`, ours adds the
tail.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLAImpl

from vllm_ddtree.attention.forward.latent import latent_forward
from vllm_ddtree.attention.metadata.builders import layer_runtime, named_after
from vllm_ddtree.attention.metadata.latent import Tail, latent_tree_builder

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.flashattn_mla import (
        FlashAttnMLADecodeMetadata,
        FlashAttnMLAMetadata,
        FlashAttnMLAMetadataBuilder,
    )

MAX_SPLITS = 32
MAX_PARTIAL_ROWS = 1 << 17
"""(row, head) pairs times key splits: partial results of 512 float32 each, 256 MiB of them."""


def prefix_splits(num_packed_rows: int, limit: int) -> int:
    """Upper bound of the key splits of one pass.

    Left to itself, FlashAttention allocates for up to 128 splits, however many rows there are.

    Args:
        num_packed_rows: (row, head) pairs of the pass.
        limit: vLLM's own bound, 0: none.

    """
    return max(1, min(limit or MAX_SPLITS, MAX_PARTIAL_ROWS // max(1, num_packed_rows)))


@functools.cache
def flash_attn_mla_builder(
    base: type[FlashAttnMLAMetadataBuilder],
) -> type[FlashAttnMLAMetadataBuilder]:
    """`latent_tree_builder` whose metadata plan the prefix pass where they plan at all.

    In a FULL graph vLLM's builder writes the plan to its own persistent buffer.
    """

    class TreeFlashAttnMLAMetadataBuilder(latent_tree_builder(base)):  # type: ignore[misc]
        def _schedule_decode(self, **plan: Any) -> torch.Tensor | None:
            runtime = layer_runtime(self)
            if not runtime.step.max_verify_len:
                return super()._schedule_decode(**plan)
            num_reqs = plan["num_reqs"]
            packed = num_reqs * plan["max_query_len"] * self.num_heads
            self.prefix_splits = prefix_splits(packed, plan["max_num_splits"])
            if runtime.step.has_plain_rows:
                # Two passes, never in a graph: FlashAttention plans each itself.
                return None
            prefix = {
                "seqlens": runtime.rows.prefix_lens[:num_reqs],
                "causal": False,
                "max_num_splits": self.prefix_splits,
            }
            return super()._schedule_decode(**{**plan, **prefix})

        def _build_decode(self, **batch: Any) -> FlashAttnMLADecodeMetadata:
            decode = super()._build_decode(**batch)
            if layer_runtime(self).step.max_verify_len:
                decode.max_num_splits = self.prefix_splits
            return decode

    return named_after(base, TreeFlashAttnMLAMetadataBuilder)


class TreeFlashAttnMLAImpl(FlashAttnMLAImpl):
    """FlashAttention 3 for prefixes and for steps without trees, our Triton kernel for the tail,
    vLLM's own prefill."""

    vllm_impl = FlashAttnMLAImpl
    tree_builder = staticmethod(flash_attn_mla_builder)
    plain_forward = FlashAttnMLAImpl.forward_mqa
    forward_mqa = latent_forward

    def prefix_pass(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        cache: torch.Tensor,
        attn_metadata: FlashAttnMLAMetadata,
        tail: Tail,
        out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `latent_forward`. It reads all rows of the decodes, those in no tail too."""
        decode = attn_metadata.decode
        rank = self.kv_lora_rank
        prefix_out, lse = flash_attn_varlen_func(
            q=query_rope,
            k=cache[..., rank:].unsqueeze(-2),
            v=cache[..., :rank].unsqueeze(-2),
            q_v=query,
            out=out if len(attn_metadata.tails) == 1 else None,
            cu_seqlens_q=decode.query_start_loc,
            max_seqlen_q=decode.max_query_len,
            seqused_k=tail.prefix_lens,
            max_seqlen_k=decode.max_seq_len,
            softmax_scale=self.scale,
            causal=False,
            block_table=decode.block_table,
            return_softmax_lse=True,
            scheduler_metadata=decode.scheduler_metadata,
            fa_version=3,
            num_splits=decode.max_num_splits,
        )
        return prefix_out.unsqueeze(0), lse.unsqueeze(0)
