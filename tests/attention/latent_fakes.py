# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's and FlashMLA's latent kernels in plain PyTorch, for machines without them.

They hold their callers to the real ones' terms: what was planned ahead is what runs, rows come in
the right shape, and what the real ones leave undefined is NaN.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vllm_ddtree.attention.kernels.reference import gather_cache


def attend(
    query: torch.Tensor,  # [n, Hq, rank + rope]
    cache: torch.Tensor,  # [num_blocks, block_size, 1, rank + rope]
    rank: int,
    blocks: torch.Tensor,  # [max_blocks]
    num_keys: int,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [n, Hq, rank] and log-sum-exp [Hq, n] of rows that see the first keys."""
    if num_keys == 0:
        return query.new_zeros(*query.shape[:2], rank), query.new_full(
            query.shape[1::-1], -torch.inf
        )
    keys = gather_cache(cache, blocks, num_keys)[:, 0]
    scores = torch.einsum("nhd,md->hnm", query, keys) * scale
    if causal:
        n = query.shape[0]
        key = torch.arange(num_keys, device=query.device)
        sees = key <= key[num_keys - n :, None]
        scores = scores.masked_fill(~sees, -torch.inf)
    return torch.einsum("hnm,mr->nhr", scores.softmax(-1), keys[:, :rank]), scores.logsumexp(-1)


def get_scheduler_metadata(**plan: Any) -> torch.Tensor:
    """What the plan was made of."""
    assert plan["num_splits"] >= 0
    fixed = [plan[name] for name in ("batch_size", "max_seqlen_q", "num_splits", "causal")]
    lens = plan["cache_seqlens"]
    numbers = torch.tensor([int(value) for value in fixed], device=lens.device)
    return torch.cat([numbers, lens, plan["cu_seqlens_q"]]).int()


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool = False,
    fa_version: int,
    scheduler_metadata: torch.Tensor | None,
    num_splits: int,
    out: torch.Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: None = None,
) -> Any:
    starts = cu_seqlens_q.tolist()
    num_reqs = len(starts) - 1
    assert fa_version == 3
    assert seqused_k.shape == (num_reqs,) and seqused_k.dtype == torch.int32
    assert block_table.shape[0] == num_reqs
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(seqused_k.max())
    if scheduler_metadata is not None:
        planned = get_scheduler_metadata(
            batch_size=num_reqs,
            max_seqlen_q=max_seqlen_q,
            num_splits=num_splits,
            causal=causal,
            cache_seqlens=seqused_k,
            cu_seqlens_q=cu_seqlens_q,
        )
        assert torch.equal(scheduler_metadata, planned)
    rank, query = v.shape[-1], torch.cat([q_v, q], dim=-1)
    if out is None:
        out = torch.full_like(q_v, float("nan"))
    lse = q.new_full((q.shape[1], q.shape[0]), float("nan"), dtype=torch.float32)
    cache = torch.cat([v, k], dim=-1)
    for req in range(num_reqs):
        rows = slice(starts[req], starts[req + 1])
        out[rows], lse[:, rows] = attend(
            query[rows], cache, rank, block_table[req], int(seqused_k[req]), softmax_scale, causal
        )
    return (out, lse) if return_softmax_lse else out


@dataclass
class SchedMeta:
    """Filled by the first call, valid for others like it."""

    planned: tuple[Any, ...] | None = None


def get_mla_metadata(*_: Any, **__: Any) -> tuple[SchedMeta, None]:
    return SchedMeta(), None


def flash_mla_with_kvcache(
    *,
    q: torch.Tensor,  # [num_reqs, length, Hq, rank + rope]
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: SchedMeta,
    softmax_scale: float,
    causal: bool,
    is_fp8_kvcache: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = (tuple(q.shape), tuple(cache_seqlens.tolist()), causal)
    meta = tile_scheduler_metadata
    assert meta.planned in (None, plan)
    meta.planned = plan
    assert block_table.shape[0] == cache_seqlens.shape[0] == q.shape[0]
    out = q.new_empty(*q.shape[:3], head_dim_v)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32).transpose(1, 2)  # [num_reqs, Hq, length]
    for req, num_keys in enumerate(cache_seqlens.tolist()):
        out[req], lse[req] = attend(
            q[req], k_cache, head_dim_v, block_table[req], num_keys, softmax_scale, causal
        )
        if num_keys == 0:
            out[req], lse[req] = float("nan"), float("inf")
    return out, lse


def install(patch: pytest.MonkeyPatch) -> None:
    """Put them where vLLM's backends, which the CPU platform never imports, and ours find them."""
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.backends.mla import flashmla as vllm_flashmla

    for function in (get_scheduler_metadata, flash_attn_varlen_func):
        patch.setattr(fa_utils, function.__name__, function, raising=False)
    from vllm.v1.attention.backends.mla import flashattn_mla

    from vllm_ddtree.attention.backends import flash_attn_mla, flashmla

    patch.setattr(flashattn_mla, "get_scheduler_metadata", get_scheduler_metadata)
    for module in (flashattn_mla, flash_attn_mla):
        patch.setattr(module, "flash_attn_varlen_func", flash_attn_varlen_func)
    patch.setattr(vllm_flashmla, "get_mla_metadata", get_mla_metadata)
    for module in (vllm_flashmla, flashmla):
        patch.setattr(module, "flash_mla_with_kvcache", flash_mla_with_kvcache)
