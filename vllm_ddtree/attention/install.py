# SPDX-License-Identifier: Apache-2.0
"""Give the target's attention layers their tree-aware backend.

Runs after the weights are loaded and before vLLM makes attention groups. A layer keeps its own
backend; its implementation and metadata builder are replaced by subclasses. The drafter's layers
are left alone.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase

from vllm_ddtree.attention.layer import variant_of
from vllm_ddtree.attention.metadata.builders import named_after
from vllm_ddtree.attention.metadata.plain import tree_builder
from vllm_ddtree.attention.registry import BACKENDS
from vllm_ddtree.round.runtime import Runtime

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend


@functools.cache
def tree_backend(base: type[AttentionBackend]) -> type[AttentionBackend]:
    """The tree-aware form of an attention backend class; it keeps the backend's name.

    Raises:
        KeyError: trees cannot be verified on this backend.

    """
    impl = BACKENDS[base.get_name()].load()
    make_builder = getattr(impl, "tree_builder", tree_builder)

    class TreeBackend(base):
        @staticmethod
        def get_impl_cls() -> type:
            return impl

        @staticmethod
        def get_builder_cls() -> type:
            return make_builder(base.get_builder_cls())

    return named_after(base, TreeBackend)


def _layers(vllm_config: VllmConfig, draft: bool) -> dict[str, AttentionLayerBase]:
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, AttentionLayerBase)
        and not isinstance(layer, MambaBase)
        and layer.is_draft_layer == draft
    }


def target_layers(vllm_config: VllmConfig) -> dict[str, AttentionLayerBase]:
    """The target's attention layers by name."""
    return _layers(vllm_config, draft=False)


def draft_layers(vllm_config: VllmConfig) -> frozenset[str]:
    """Names of the drafter's attention layers, which are loaded after the target's."""
    return frozenset(_layers(vllm_config, draft=True))


def install_tree_attention(vllm_config: VllmConfig, runtime: Runtime) -> str:
    """Make every attention layer of the target tree-aware.

    Each of them can verify trees: `config.loaded_target.check_loaded_target` has looked at it.

    Returns:
        How the layers verify trees, in words, for the start-up line.

    """
    words = set()
    for layer in target_layers(vllm_config).values():
        row = BACKENDS[layer.attn_backend.get_name()]
        words.add(row.words_of(layer.sliding_window))
        layer.attn_backend = tree_backend(layer.attn_backend)
        layer.impl.__class__ = row.load()
        layer.impl.tree_runtime = runtime
        if not row.latent:
            layer.impl.tree_variant = variant_of(layer, runtime.max_depth)
    return ", ".join(sorted(words))
