# SPDX-License-Identifier: Apache-2.0
"""Prefix + tail over the cache of multi-head latent attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from vllm_ddtree.attention.forward.triton_prefix import triton_latent_prefix_pass
from vllm_ddtree.attention.kernels.latent_tail import latent_tail
from vllm_ddtree.attention.metadata.latent import Tail
from vllm_ddtree.integration.attention import latent_scale

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

PrefixPass = Callable[[Tail, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(tail, out) -> output [P, T, Hq, rank] and log-sum-exp [P, Hq, T] of the tail's rows over the
keys before it, as `latent_tail` takes them. `out` [T, Hq, rank] may serve as the output if no other
tail has written there."""


def latent_forward(
    self: Any,
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_c_and_k_pe_cache: torch.Tensor,
    attn_metadata: Any,
    layer: MLAAttention,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`MLACommonImpl.forward_mqa` (model_executor/layers/attention/mla_attention.py).

    The implementation is a subclass of the backend's by single inheritance, as in `tree_forward`.
    It has:

    - `vllm_impl`, the backend's class, and `plain_forward`, that class's forward_mqa, which serves
      batches without tails.
    - `prefix_pass(query, query_rope, cache, attn_metadata, tail, out)`, which gives what
      `PrefixPass` gives; None: our own kernel reads the prefix.

    Args:
        self: the implementation.
        q: [T, Hq, rank + rope], or its two parts.
        kv_c_and_k_pe_cache: [num_blocks, block_size, rank + rope].
        attn_metadata: the backend's, with `tails`.
        layer: the implementation's layer.

    Returns:
        The output [T, Hq, rank], and None in place of the log-sum-exp.

    """
    if attn_metadata.tails is None:
        return self.plain_forward(q, kv_c_and_k_pe_cache, attn_metadata, layer)
    rank, cache = self.kv_lora_rank, kv_c_and_k_pe_cache
    query, rope = q if isinstance(q, tuple) else (q[..., :rank], q[..., rank:])
    fp8 = cache.dtype == current_platform.fp8_dtype()
    prefix_pass: PrefixPass | None = None
    if self.prefix_pass is not None:
        prefix_pass = functools.partial(self.prefix_pass, query, rope, cache, attn_metadata)
    # Padding rows belong to no tail, and what they hold goes on through the model.
    out = query.new_zeros(*query.shape[:2], rank)
    for tail in attn_metadata.tails:
        latent_attention(
            query,
            rope,
            cache,
            attn_metadata.decode.block_table,
            attn_metadata.slot_mapping,
            tail,
            out,
            self.scale,
            prefix_pass,
            latent_scale(layer) if fp8 else None,
        )
    return out, None


def latent_attention(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    tail: Tail,
    out: torch.Tensor,
    scale: float,
    prefix_pass: PrefixPass | None = None,
    cache_scale: torch.Tensor | None = None,
) -> None:
    """Write the attention output of a tail's rows; other rows stay as they are.

    Args:
        query: [T, Hq, rank], the query, W_UK absorbed.
        query_rope: [T, Hq, rope].
        cache: [num_blocks, block_size, rank + rope], this step's rows already written.
        block_table: int32 [num_reqs, max_blocks], blocks of each request.
        slot_mapping: int64 [>= T], KV slot of each row.
        tail: the rows.
        out: [T, Hq, rank], written.
        scale: what scores are multiplied by.
        prefix_pass: attention to the keys before the tail; None: our own kernel's.
        cache_scale: float32, one element, what the numbers of an fp8 cache are multiplied by.

    """
    if prefix_pass is None:
        prefix = triton_latent_prefix_pass(
            query, query_rope, cache, block_table, tail, scale, cache_scale
        )
    else:
        prefix = prefix_pass(tail, out)
    latent_tail(
        query,
        query_rope,
        cache,
        slot_mapping,
        tail.masks,
        tail.ends,
        tail.lens,
        *prefix,
        out,
        scale,
        block_table.shape[0],
        tail.max_len,
        cache_scale,
    )
