# SPDX-License-Identifier: Apache-2.0
"""Lattices of drafts at every position of a text, and their acceptance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.training.common import DEVICE, autocast
from benchmarks.training.nets import Drafter, Target
from benchmarks.training.oracle import Lattice, acceptance

TOP_K = 16
# (hidden [N, D, H], candidate ids [N, D, K], log-probs [N, D, K], anchors' ids [N],
#  contexts [N, H]) -> scores [N, D, K, K]
Scores = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def lattice_of(scores: Tensor, log_probs: Tensor) -> Tensor:
    """Log-probs of a lattice: a softmax over the candidates times their mass in the vocabulary."""
    return scores.float().log_softmax(-1) + log_probs.logsumexp(-1)[..., None, None]


@torch.no_grad()
def draft_positions(
    target: Target, drafter: Drafter, texts: Tensor, first: int, block: int, skip: int = 1
) -> tuple[Tensor, Tensor]:
    """Drafts at every anchor from `first` on.

    Args:
        target: the target.
        drafter: its drafter.
        texts: int [N, L].
        first: position of the first anchor.
        block: rows of a draft.
        skip: rows at its begin that predict nothing (1: the anchor's).

    Returns:
        hidden [N, P, D, H] and the drafter's context [N, L, H].

    """
    hidden, contexts = [], []
    last = texts.shape[1] - block
    # Few texts and positions at a time: the mask is [positions * block, length].
    for part in texts.long().split(8):
        with autocast():
            features = target(part)[1]
            contexts.append(drafter.context(features).float())
            rows = []
            for begin in range(first, last, 32):
                anchors = torch.arange(begin, min(begin + 32, last), device=texts.device)
                anchors = anchors[None].expand(len(part), -1)
                embeds = F.embedding(part.gather(1, anchors), target.embedding)
                rows.append(drafter(features, embeds, anchors, block)[:, :, skip:].float())
        hidden.append(torch.cat(rows, 1))
    return torch.cat(hidden), torch.cat(contexts)


@torch.no_grad()
def candidates(embedding: Tensor, hidden: Tensor, top_k: int = TOP_K) -> tuple[Tensor, Tensor]:
    """Ids and log-probs [..., K] of the best tokens, without their condition."""
    with autocast():
        logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    best = logits.log_softmax(-1).topk(top_k, -1)
    return best.indices, best.values


def measure(
    texts: Tensor, prompt: int, ids: Tensor, log_probs: Tensor, unary: bool
) -> dict[str, float]:
    """Acceptance of lattices [N, P, D, K, K], or of [N, P, D, K] if `unary`."""
    all_ids, values = ids.cpu().numpy(), log_probs.float().cpu().numpy()
    depth, top_k = all_ids.shape[2:]

    def lattice_at(number: int, at: int) -> Lattice:
        own = values[number, at - prompt + 1]
        if unary:
            own = np.broadcast_to(own[:, None], (depth, top_k, top_k))
        return own, all_ids[number, at - prompt + 1]

    return acceptance(texts.cpu().numpy(), prompt, lattice_at, depth)


def measure_dflash(
    target: Target, drafter: Drafter, texts: Tensor, prompt: int, block: int
) -> dict[str, float]:
    """Acceptance of a plain DFlash drafter with `block` - 1 masks."""
    target, drafter = target.to(DEVICE), drafter.to(DEVICE)
    hidden, _ = draft_positions(target, drafter, texts, prompt - 1, block)
    pairs = [candidates(target.embedding, rows) for rows in hidden]
    ids, log_probs = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return measure(texts, prompt, ids, log_probs, unary=True)
