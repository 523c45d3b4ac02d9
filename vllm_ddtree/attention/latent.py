# SPDX-License-Identifier: Apache-2.0
"""Prefix + tail over the cache of multi-head latent attention."""

from dataclasses import dataclass

import torch

from vllm_ddtree.attention.latent_prefix import latent_prefix, latent_segments, tile_rows
from vllm_ddtree.attention.latent_tail import latent_tail
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


def latent_attention(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    tail: Tail,
    out: torch.Tensor,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> None:
    """Write the attention output of a tail's rows; other rows stay as they are.

    query         [T, Hq, rank]   the query, W_UK absorbed
    query_rope    [T, Hq, rope]
    cache         [num_blocks, block_size, rank + rope], this step's rows already written
    block_table   int32 [num_reqs, max_blocks]
    slot_mapping  int64 [>= T]
    out           [T, Hq, rank]
    cache_scale   float32, one element: what the numbers of an fp8 cache are multiplied by
    """
    num_reqs, packed = block_table.shape[0], tail.max_len * query.shape[1]
    block_m = tile_rows(packed, cache.shape[-1] * query.element_size(), out.device)
    segments = latent_segments(num_reqs, packed, block_m, num_sms(out.device))
    # Inside a FULL graph these come from the graph's own pool.
    if segments == 1:
        prefix_out = out.unsqueeze(0)
    else:
        prefix_out = out.new_empty(segments, *out.shape, dtype=torch.float32)
    prefix_lse = out.new_empty(segments, out.shape[1], out.shape[0], dtype=torch.float32)
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
    latent_tail(
        query,
        query_rope,
        cache,
        slot_mapping,
        tail.masks,
        tail.ends,
        tail.lens,
        prefix_out,
        prefix_lse,
        out,
        scale,
        num_reqs,
        tail.max_len,
        cache_scale,
    )
