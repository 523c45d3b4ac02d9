# SPDX-License-Identifier: Apache-2.0
"""Give the target's attention layers their tree-aware backend.

Runs after the weights are loaded and before vLLM makes attention groups. A layer keeps its own
backend; its implementation and metadata builder are replaced by subclasses. The drafter's layers
are left alone.
"""

import functools
from typing import Any

from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_ddtree.attention.metadata import named_after, tree_builder
from vllm_ddtree.attention.variant import variant_of
from vllm_ddtree.round.runtime import Runtime


def tree_impl(backend_name: str, window: int | None = None) -> tuple[type, str]:
    """Tree-aware implementation class of a backend, and its form (for a layer's sliding window) in
    words.
    """
    if backend_name == "FLASH_ATTN":
        from vllm_ddtree.attention import prefix_pass
        from vllm_ddtree.attention.backends import flash_attn as flash

        return flash.TreeFlashAttentionImpl, prefix_pass.FORM if window else flash.FORM
    if backend_name == "TRITON_ATTN":
        from vllm_ddtree.attention.backends import triton_attn as triton

        return triton.TreeTritonAttentionImpl, triton.FORM
    if backend_name == "FLASHINFER":
        from vllm_ddtree.attention import prefix_pass
        from vllm_ddtree.attention.backends import flashinfer

        return flashinfer.TreeFlashInferImpl, prefix_pass.FORM if window else flashinfer.FORM
    if backend_name == "FLASH_ATTN_MLA":
        from vllm_ddtree.attention.backends import flash_attn_mla

        return flash_attn_mla.TreeFlashAttnMLAImpl, flash_attn_mla.FORM
    if backend_name == "FLASHMLA":
        from vllm_ddtree.attention.backends import flashmla

        return flashmla.TreeFlashMLAImpl, flashmla.FORM
    if backend_name == "TRITON_MLA":
        from vllm_ddtree.attention.backends import triton_mla

        return triton_mla.TreeTritonMLAImpl, triton_mla.FORM
    from vllm_ddtree.attention.backends import cpu_attn as cpu

    return cpu.TreeCPUAttentionImpl, cpu.FORM


@functools.cache
def tree_backend(base: type) -> type:
    """The tree-aware form of an attention backend class; it keeps the backend's name."""
    impl, _ = tree_impl(base.get_name())  # type: ignore[attr-defined]
    make_builder = getattr(impl, "tree_builder", tree_builder)

    class TreeBackend(base):
        @staticmethod
        def get_impl_cls() -> type:
            return impl

        @staticmethod
        def get_builder_cls() -> type:
            return make_builder(base.get_builder_cls())  # type: ignore[attr-defined]

    return named_after(base, TreeBackend)


def _layers(vllm_config: Any, draft: bool) -> dict[str, Any]:
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, AttentionLayerBase) and layer.is_draft_layer == draft
    }


def target_layers(vllm_config: Any) -> dict[str, Any]:
    """The target's attention layers by name."""
    return _layers(vllm_config, draft=False)


def draft_layers(vllm_config: Any) -> frozenset[str]:
    """Names of the drafter's attention layers, which are loaded after the target's."""
    return frozenset(_layers(vllm_config, draft=True))


def install_tree_attention(vllm_config: Any, runtime: Runtime) -> str:
    """Make every attention layer of the target tree-aware.

    Each of them can verify trees: `config.loaded_target.check_loaded_target` has looked at it.

    Returns:
        The attention form in words, for the start-up line.

    """
    forms = set()
    for layer in target_layers(vllm_config).values():
        impl, form = tree_impl(layer.attn_backend.get_name(), layer.sliding_window)
        layer.attn_backend = tree_backend(layer.attn_backend)
        layer.impl.__class__ = impl
        layer.impl.tree_runtime = runtime
        if not isinstance(layer, MLAAttention):
            layer.impl.tree_variant = variant_of(layer, runtime.max_depth)
        forms.add(form)
    return ", ".join(sorted(forms))
