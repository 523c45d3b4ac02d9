# SPDX-License-Identifier: Apache-2.0
"""The recurrent layers of vLLM that can follow trees, and how each is made to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend

from vllm_ddtree.recurrent.forward import delta_view, tree_core
from vllm_ddtree.recurrent.mamba2_forward import mamba2_core, mamba2_view

if TYPE_CHECKING:
    from vllm_ddtree.recurrent.layer import StateLayer
    from vllm_ddtree.recurrent.target import RecurrentTarget


@dataclass(frozen=True)
class LayerKind:
    """One class of vLLM's recurrent layers."""

    backend: Any
    """vLLM's `AttentionBackend`, whose builder makes the layer's metadata."""
    view: Callable[[Any], StateLayer]
    """(layer) -> its tensors, whose caches are bound."""
    set_core: Callable[[str, Any, RecurrentTarget], None]
    """(name, layer, target): gives the layer its tree-aware core."""
    solves: bool
    """Whether updates of a tree's rows depend on each other."""


def set_delta_core(name: str, layer: Any, target: RecurrentTarget) -> None:
    """`LayerKind.set_core` of gated delta net."""
    # Else vLLM goes past `_forward_core`, to a kernel for its own chains.
    layer.enable_fused_gdn_spec_decode = False
    layer.gdn_decode_kernel = "triton"
    layer._forward_core = tree_core(name, layer._forward_core, target)


def set_mamba2_core(name: str, layer: Any, target: RecurrentTarget) -> None:
    """`LayerKind.set_core` of Mamba2."""
    layer.conv_ssm_forward = mamba2_core(name, layer, layer.conv_ssm_forward, target)


KINDS: dict[type, LayerKind] = {
    QwenGatedDeltaNetAttention: LayerKind(GDNAttentionBackend, delta_view, set_delta_core, True),
    MambaMixer2: LayerKind(Mamba2AttentionBackend, mamba2_view, set_mamba2_core, False),
}
"""By vLLM's class. Subclasses compute something else behind the same names."""
