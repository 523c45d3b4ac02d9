# SPDX-License-Identifier: Apache-2.0
"""What a layer's attention adds to plain softmax attention, as the tree passes take it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """Sliding window and logit soft-cap of one layer; 0 stands for none."""

    window: int = 0
    """Positions along the branch that a row sees, its own included."""
    tail_window: int = 0
    """The window where it can hide an ancestor: 0 if it is longer than any branch."""
    soft_cap: float = 0.0
    """Scores s become soft_cap * tanh(s / soft_cap)."""


def variant_of(layer: Any, depth: int) -> Variant:
    """The variant of a vLLM `Attention` layer, for trees of at most `depth` levels below the root.

    Attention sinks stay with the implementation (`sinks`), which may replace them as it runs.
    """
    window = layer.sliding_window or 0
    return Variant(
        window=window,
        tail_window=window if window <= depth else 0,
        soft_cap=float(getattr(layer.impl, "logits_soft_cap", None) or 0),
    )
