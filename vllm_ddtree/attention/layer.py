# SPDX-License-Identifier: Apache-2.0
"""What the tree passes read off a layer: its window and soft-cap, and the scales of its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ddtree.attention.kernels.scales import Scales
from vllm_ddtree.attention.registry import FP8_CACHES
from vllm_ddtree.integration.attention import quant_scales

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.attention.backend import AttentionImpl


@dataclass(frozen=True)
class Variant:
    """Sliding window and logit soft-cap of one layer; 0 stands for none."""

    window: int = 0
    """Positions along the branch that a row sees, its own included."""
    tail_window: int = 0
    """The window where it can hide an ancestor: 0 if it is longer than any branch."""
    soft_cap: float = 0.0
    """Scores s become soft_cap * tanh(s / soft_cap)."""


def variant_of(layer: Attention, depth: int) -> Variant:
    """The variant of a layer, for trees of at most `depth` levels below the root.

    Attention sinks stay with the implementation (`sinks`), which may replace them as it runs.
    """
    window = layer.sliding_window or 0
    return Variant(
        window=window,
        tail_window=window if window <= depth else 0,
        soft_cap=float(getattr(layer.impl, "logits_soft_cap", None) or 0),
    )


def scales_of(impl: AttentionImpl, layer: Attention, dtype: torch.dtype) -> Scales | None:
    """A layer's scales; None if its cache is not quantised.

    Args:
        impl: the layer's attention implementation.
        layer: vLLM's layer, whose scales have one element, or Hkv.
        dtype: the model's.

    """
    if impl.kv_cache_dtype not in FP8_CACHES:
        return None
    query, key, value = (scale.expand(impl.num_kv_heads) for scale in quant_scales(layer))
    return Scales(query, key, value, dtype)
