# SPDX-License-Identifier: Apache-2.0
"""Whether two answers to one request differ by rounding alone.

In half precision a logit depends on the batch's shape. So two runs may choose differently where two
choices are nearly as good. The *gap* says how nearly: it is the smallest difference of two logits
without which either choice could stand. The logits are those of a third party, an engine without
speculation that reads prompt and common text as a prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

LARGEST_GAP = 64.0
"""Logits; what needs more than that counts as infinitely far."""


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; None: one is the other, or its beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def processed(
    logits: np.ndarray, params: dict[str, Any], prompt: Sequence[int], text: Sequence[int]
) -> np.ndarray:
    """Logits [V] as a request sees them: penalties (v1/worker/gpu/sample/penalties.py), tokens that
    are not allowed at -inf.

    Args:
        logits: [V] float64, raw.
        params: the request's.
        prompt: its token ids.
        text: tokens it has generated before this one.

    """
    out = logits.astype(np.float64)
    repetition = params.get("repetition_penalty", 1.0)
    seen = sorted({*prompt, *text})
    out[seen] = np.where(out[seen] > 0, out[seen] / repetition, out[seen] * repetition)
    for token, count in Counter(text).items():
        out[token] -= params.get("frequency_penalty", 0.0) * count
        out[token] -= params.get("presence_penalty", 0.0)
    if (allowed := params.get("allowed_token_ids")) is not None:
        out[np.setdiff1d(np.arange(len(out)), allowed)] = -math.inf
    return out


def noise_difference(a: int, b: int, vocab_size: int, seed: int, position: int) -> float:
    """Gumbel noise of token a less that of token b, to 1/1000.

    By vLLM's own kernel: which of the two does it draw, as the first one's logit rises?

    Args:
        a, b: token ids.
        vocab_size: tokens that there are.
        seed: the request's.
        position: of the token before, in the sequence.

    """
    import torch
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = 32
    low, width = -64.0, 128.0
    with torch.device(device):
        mapping = torch.zeros(rows, dtype=torch.int32)
        one = torch.ones(1)
        seeds = torch.tensor([seed], dtype=torch.int64)
        positions = torch.full((rows,), position, dtype=torch.int64)
        while width > 1e-3:
            shifts = low + width * torch.arange(1, rows + 1) / rows
            logits = torch.full((rows, vocab_size), -math.inf)
            logits[:, a], logits[:, b] = shifts, 0.0
            drawn = gumbel_sample(
                logits, mapping, one, seeds, positions, apply_temperature=False, is_drafting=False
            )
            before = int((drawn == b).sum())  # rows whose shift does not yet make up for the noise
            low, width = low + width * before / rows, width / rows
    return -(low + width / 2)


def gap(
    logits: np.ndarray, params: dict[str, Any], one: int, other: int, noise: float = 0.0
) -> float:
    """The gap between two choices, in logits.

    Args:
        logits: [V], of `processed`.
        params: the request's temperature, top_k and top_p.
        one, other: the two tokens.
        noise: Gumbel noise of `one` less that of `other`.

    """
    temperature = params["temperature"]
    lead = logits[one] - logits[other] + temperature * noise
    if not temperature:
        return float(abs(lead))
    # Or the better one was kept out by a limit that is as near.
    better = one if lead > 0 else other
    return float(min(abs(lead), _limit_gap(logits, params, better)))


def _limit_gap(logits: np.ndarray, params: dict[str, Any], token: int) -> float:
    """How far logits must move apart for a token to leave, or enter, what top_k and top_p keep.

    Each logit moves by half of it, up or down, as helps most.
    """
    if not (0 < params.get("top_k", 0) < len(logits) or params.get("top_p", 1.0) < 1):
        return math.inf

    def leaves(gap: float) -> bool:
        # Whatever can comes before the token, and gains.
        moved = logits + np.where(logits > logits[token] - gap, gap / 2, -gap / 2)
        moved[token] = logits[token] - gap / 2
        return not _kept(moved, params, token)

    def enters(gap: float) -> bool:
        # What must stay before the token loses, the rest gains as much as leaves it behind.
        own = logits[token] + gap / 2
        behind = np.minimum(logits + gap / 2, np.nextafter(own, -math.inf))
        moved = np.where(logits > logits[token] + gap, logits - gap / 2, behind)
        moved[token] = own
        return _kept(moved, params, token)

    changes = leaves if _kept(logits, params, token) else enters
    low, high = 0.0, LARGEST_GAP
    if not changes(high):
        return math.inf
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if changes(middle) else (middle, high)
    return high


def _kept(logits: np.ndarray, params: dict[str, Any], token: int) -> bool:
    """Whether top_k and top_p keep a token: those before it have less than top_p."""
    order = np.argsort(-logits, kind="stable")
    kept = order[: params.get("top_k") or None]
    place = np.flatnonzero(kept == token)
    if not len(place):
        return False
    scaled = logits[kept] / params["temperature"]
    mass = np.exp(scaled - scaled[0])
    return bool(mass[: place[0]].sum() < params.get("top_p", 1.0) * mass.sum())
