# SPDX-License-Identifier: Apache-2.0
"""Candidate heads in plain PyTorch, with the names and formulas of vLLM's models.

vllm/model_executor/models/{qwen3_dflash2,lilicorr,qwen3_dspark}.py. Each gives scores
[..., D, K, K]: of candidate c of a depth after candidate p of the depth before.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Selector(nn.Module):
    """DFlash2's `candidate_selector`."""

    def __init__(self, hidden: int, vocab: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=hidden**-0.5)

    def after(self, hidden: Tensor, before: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
        """Scores [..., K] of candidates `ids` after the token `before` [...]."""
        gate = self.hidden_projection(hidden) * self.predecessor_codebook[before]
        return logits + (self.successor_codebook[ids] * gate[..., None, :]).sum(-1)

    def forward(self, hidden: Tensor, ids: Tensor, logits: Tensor, anchors: Tensor) -> Tensor:
        """hidden [N, D, H], ids and logits [N, D, K], anchors [N] -> [N, D, K, K]."""
        gate = self.hidden_projection(hidden)[:, :, None]
        first = anchors[:, None, None].expand(-1, 1, ids.shape[-1])
        before = self.predecessor_codebook[torch.cat([first, ids[:, :-1]], 1)]
        pairs = torch.einsum("ndpr,ndcr->ndpc", before * gate, self.successor_codebook[ids])
        return logits[:, :, None] + pairs


class Markov(nn.Module):
    """DSpark's vanilla `markov_head`, and `confidence_head` with the Markov embedding."""

    def __init__(self, hidden: int, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        self.proj = nn.Linear(hidden + rank, 1)
        nn.init.zeros_(self.markov_w2.weight)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def bias(self, before: Tensor) -> Tensor:
        """Bias [..., V] of the logits after the tokens `before` [...]."""
        return self.markov_w2(self.markov_w1(before))

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logit of the chance that the draft at a position is right if those before it are."""
        inputs = torch.cat([hidden.float(), self.markov_w1(before).float()], -1)
        return self.proj(inputs.detach())[..., 0]

    def forward(self, ids: Tensor, logits: Tensor, anchors: Tensor) -> Tensor:
        """ids and base logits [N, D, K], anchors [N] -> [N, D, K, K]."""
        first = anchors[:, None, None].expand(-1, 1, ids.shape[-1])
        before = self.markov_w1(torch.cat([first, ids[:, :-1]], 1))
        pairs = torch.einsum("ndpr,ndcr->ndpc", before, self.markov_w2.weight[ids])
        return logits[:, :, None] + pairs

    def checkpoint(self) -> dict[str, Tensor]:
        return {
            "markov_head.markov_w1.weight": self.markov_w1.weight,
            "markov_head.markov_w2.weight": self.markov_w2.weight,
            "confidence_head.proj.weight": self.proj.weight,
            "confidence_head.proj.bias": self.proj.bias,
        }


class _UpDown(nn.Module):
    def __init__(self, size: int, inner: int, out: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(size, inner), nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class _LatticeAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * hidden, hidden) * hidden**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * hidden))
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return self.out_proj(out.transpose(1, 2).flatten(2))


class _LatticeLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, ratio: float, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=eps), nn.RMSNorm(hidden, eps=eps)
        self.attn = _LatticeAttention(hidden, heads)
        self.mlp = _UpDown(hidden, int(hidden * ratio), hidden)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class LiLiCorr(nn.Module):
    """The `lilicorr` head: attention over all candidates, then two vectors of each."""

    def __init__(self, hidden: int, block: int, eps: float, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.block = config, block
        size, top_k = config["lilicorr_hidden_size"], config["lilicorr_candidate_topk"]
        heads, factor = config["lilicorr_num_heads"], config["lilicorr_factor_dim"]
        slots = block - 1
        self.token_proj = nn.Linear(hidden, size) if hidden != size else nn.Identity()
        self.pass_hidden_proj = nn.Linear(hidden, size)
        self.feature_norm = nn.LayerNorm(5)
        self.feature_mlp = _UpDown(5, size, size)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, size))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, top_k, size))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * block - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.context_proj = nn.Linear(hidden, size)
        self.layers = nn.ModuleList(
            _LatticeLayer(size, heads, config["lilicorr_mlp_ratio"], eps)
            for _ in range(config["lilicorr_num_layers"])
        )
        self.output_norm, self.anchor_norm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head = nn.Linear(size, factor), nn.Linear(size, factor)
        self.anchor_out_head = nn.Linear(size, factor)
        if hidden != size:  # embeddings are small
            nn.init.normal_(self.token_proj.weight, std=1.0)

    def attention_bias(self, slots: int) -> Tensor:
        top_k = self.config["lilicorr_candidate_topk"]
        slot = torch.arange(slots, device=self.same_slot_bias.device).repeat_interleave(top_k)
        apart = slot[:, None] - slot[None]
        bias = self.relative_slot_bias[:, apart + self.block - 1]
        return bias + (apart == 0) * self.same_slot_bias[:, None, None]

    def forward(self, embeds: Tensor, log_probs: Tensor, hidden: Tensor, anchor: Tensor) -> Tensor:
        """Scores [N, D, K, K].

        Args:
            embeds: [N, D, K, H], the target's embeddings of the candidates.
            log_probs: float32 [N, D, K], over the whole vocabulary.
            hidden: [N, D, H], the drafter's.
            anchor: [N, H], the drafter's context of the last token before the anchor.

        """
        batch, slots, top_k = log_probs.shape
        rank = torch.arange(top_k, device=log_probs.device, dtype=torch.float32)
        features = torch.stack(
            [
                log_probs,
                log_probs.exp(),
                log_probs - log_probs.max(-1, keepdim=True).values,
                (rank / max(1, top_k - 1)).expand_as(log_probs),
                (rank == 0).float().expand_as(log_probs),
            ],
            -1,
        )
        x = self.token_proj(embeds) + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(features))
        x = x + self.slot_embedding[:, 0, :slots] + self.rank_embedding[:, 0]
        x = x.flatten(1, 2)
        bias = self.attention_bias(slots)[None]
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).view(batch, slots, top_k, -1)
        context = self.anchor_norm(self.context_proj(anchor))
        row = context[:, None, None].expand_as(x)
        x = F.silu(self.factor_input_proj(torch.cat([x, row, x * row], -1)))
        eps, scale = self.config["lilicorr_vector_eps"], self.config["lilicorr_logit_scale"]
        leaving = F.normalize(self.out_head(x).float(), dim=-1, eps=eps)
        entering = F.normalize(self.in_head(x).float(), dim=-1, eps=eps)
        start = F.normalize(self.anchor_out_head(context).float(), dim=-1, eps=eps)
        first = (start[:, None] * entering[:, 0]).sum(-1)
        pairs = leaving[:, :-1] @ entering[:, 1:].transpose(-1, -2)
        first = first[:, None, None].expand(-1, 1, top_k, -1)
        return scale * torch.cat([first, pairs], 1)


def lilicorr_config(hidden: int) -> dict[str, Any]:
    return {
        "lilicorr_enabled": True,
        "lilicorr_hidden_size": max(64, hidden // 3),
        "lilicorr_candidate_topk": 16,
        "lilicorr_num_heads": 4,
        "lilicorr_num_layers": 2,
        "lilicorr_mlp_ratio": 2.0,
        "lilicorr_factor_dim": 64,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 24.0,
    }
