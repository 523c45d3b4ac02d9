# SPDX-License-Identifier: Apache-2.0
"""Prefix + tail over the cache of multi-head latent attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_ddtree.attention.kernels.latent_prefix import latent_prefix, latent_segments, tile_rows
from vllm_ddtree.attention.kernels.latent_tail import latent_tail
from vllm_ddtree.attention.prefix_pass import num_sms

FORM = "Triton latent prefix + Triton latent tail"


@dataclass
class Tail:
    """Rows at the end, or in front of the end, of each request of a batch; see `latent_tail`."""

    ends: torch.Tensor
    """[num_reqs] int32, row after the last of the tail."""
    lens: torch.Tensor
    """[num_reqs] int32, 0 without a tail."""
    prefix_lens: torch.Tensor
    """[num_reqs] int32, keys before the tail."""
    max_len: int
    """Upper bound of lens."""
    masks: torch.Tensor | None
    """[max_num_tokens, W] int32 ancestor bitmask by row; None: causal."""


PrefixPass = Callable[[Tail, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(tail, out) -> output [P, T, Hq, rank] and log-sum-exp [P, Hq, T] of the tail's rows over the
keys before it, as `latent_tail` takes them. `out` [T, Hq, rank] may serve as the output if no other
tail has written there."""


def latent_forward(
    self: Any,
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_c_and_k_pe_cache: torch.Tensor,  # [num_blocks, block_size, rank + rope]
    attn_metadata: Any,
    layer: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`MLACommonImpl.forward_mqa` (model_executor/layers/attention/mla_attention.py).

    q is [T, Hq, rank + rope], or its two parts; returns the output [T, Hq, rank].

    The implementation is a subclass of the backend's by single inheritance, as in `tree_forward`,
    with its forward_mqa as `plain_forward` and `prefix_pass(query, query_rope, cache,
    attn_metadata, tail, out)`, which gives what `PrefixPass` gives; None: our own kernel's.
    """
    if attn_metadata.tails is None:
        return self.plain_forward(q, kv_c_and_k_pe_cache, attn_metadata, layer)
    rank, cache = self.kv_lora_rank, kv_c_and_k_pe_cache
    query, rope = q if isinstance(q, tuple) else (q[..., :rank], q[..., rank:])
    fp8 = cache.dtype == current_platform.fp8_dtype()
    prefix_pass = None
    if self.prefix_pass is not None:
        prefix_pass = lambda tail, out: self.prefix_pass(  # noqa: E731
            query, rope, cache, attn_metadata, tail, out
        )
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
            layer._k_scale if fp8 else None,
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

    query         [T, Hq, rank]   the query, W_UK absorbed
    query_rope    [T, Hq, rope]
    cache         [num_blocks, block_size, rank + rope], this step's rows already written
    block_table   int32 [num_reqs, max_blocks]
    slot_mapping  int64 [>= T]
    out           [T, Hq, rank]
    prefix_pass   None: our own kernel's
    cache_scale   float32, one element: what the numbers of an fp8 cache are multiplied by
    """
    if prefix_pass is None:
        prefix = triton_prefix_pass(query, query_rope, cache, block_table, tail, scale, cache_scale)
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


def triton_prefix_pass(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    tail: Tail,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `PrefixPass` of our own kernel; arguments as those of `latent_attention`.

    Its output is float32, so that it is rounded once, with the tail, as in vLLM's decode kernel.
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
