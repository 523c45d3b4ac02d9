# SPDX-License-Identifier: Apache-2.0
"""Give the target's attention layers their tree-aware backend.

Runs after the weights are loaded and before vLLM makes attention groups. A layer keeps its own
backend; its implementation and metadata builder are replaced by subclasses. The drafter's layers
are left alone.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType

from vllm_ddtree.attention.layer import variant_of
from vllm_ddtree.attention.metadata.builders import named_after
from vllm_ddtree.attention.metadata.plain import tree_builder
from vllm_ddtree.attention.registry import BACKENDS, FP8_CACHES, backend, one_of, supported
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


def _refuse(name: str, what: str, fix: str) -> ValueError:
    return ValueError(f"method ddtree cannot verify trees in target layer {name}: {what}; {fix}")


def _refuse_cache(name: str, layer: Any, caches: tuple[str, ...]) -> ValueError:
    fix = "set --kv-cache-dtype to auto" + (" or fp8" if caches else "")
    return _refuse(name, f"KV cache dtype {layer.kv_cache_dtype}", fix)


def check_layer(name: str, layer: Any) -> None:
    """Raise ValueError for a target layer whose attention cannot be a tree's."""
    elsewhere = "use method dflash for this target"
    if type(layer) is MLAAttention:
        _check_latent_layer(name, layer)
        return
    # Subclasses (chunked, prefix-LM, static sinks ...) change what a row sees behind this layer.
    if type(layer) is not Attention:
        raise _refuse(
            name,
            f"{type(layer).__name__} is neither plain multi-head nor latent attention",
            elsewhere,
        )
    impl: Any = layer.impl
    if layer.attn_type != AttentionType.DECODER:
        raise _refuse(name, f"attention type {layer.attn_type}", elsewhere)
    row = backend(layer.attn_backend.get_name())
    if row is None or row.latent or not isinstance(impl, row.base()):
        raise _refuse(
            name,
            f"attention backend {layer.attn_backend.get_name()}",
            f"set --attention-backend to {one_of(supported(latent=False, chosen=True)[:2])}",
        )
    if getattr(impl, "alibi_slopes", None) is not None:
        raise _refuse(name, "ALiBi", elsewhere)
    if getattr(impl, "chunk_lookback", -1) > -1:
        raise _refuse(name, "chunked attention", elsewhere)
    if layer.head_size_v != layer.head_size:
        raise _refuse(name, "value heads of another size than key heads", elsewhere)
    caches = FP8_CACHES if row.fp8_cache else ()
    if layer.kv_cache_torch_dtype != layer.dtype and layer.kv_cache_dtype not in caches:
        raise _refuse_cache(name, layer, caches)
    if layer.kv_sharing_target_layer_name is not None:
        raise _refuse(name, "a KV cache shared with another layer", elsewhere)
    if getattr(impl, "fa4_hd256", False):
        raise _refuse(
            name,
            "FlashAttention 4 with heads of 256",
            "set --attention-backend to TRITON_ATTN",
        )


def _check_latent_layer(name: str, layer: Any) -> None:
    """`check_layer` of a layer with multi-head latent attention."""
    elsewhere = "use method dflash for this target"
    if getattr(layer, "use_sparse", False) or getattr(layer.impl, "is_sparse", False):
        raise _refuse(name, "sparse latent attention (an indexer)", elsewhere)
    row = backend(layer.attn_backend.get_name())
    if row is None or not row.latent or type(layer.impl) is not row.base():
        raise _refuse(
            name,
            f"attention backend {layer.attn_backend.get_name()}",
            f"set --attention-backend to {one_of(supported(latent=True))}",
        )
    if layer.sliding_window is not None:
        raise _refuse(name, "latent attention with a sliding window", elsewhere)
    caches = FP8_CACHES if row.fp8_cache else ()
    if layer.kv_cache_dtype not in ("auto", "float16", "bfloat16", *caches):
        raise _refuse_cache(name, layer, caches)


def _layers(vllm_config: VllmConfig, draft: bool) -> dict[str, AttentionLayerBase]:
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, AttentionLayerBase) and layer.is_draft_layer == draft
    }


def target_layers(vllm_config: VllmConfig) -> dict[str, AttentionLayerBase]:
    """The target's attention layers by name."""
    return _layers(vllm_config, draft=False)


def draft_layers(vllm_config: VllmConfig) -> frozenset[str]:
    """Names of the drafter's attention layers, which are loaded after the target's."""
    return frozenset(_layers(vllm_config, draft=True))


def install_tree_attention(vllm_config: VllmConfig, runtime: Runtime) -> str:
    """Make every attention layer of the target tree-aware.

    Returns:
        How the layers verify trees, in words, for the start-up line.

    Raises:
        ValueError: a layer cannot verify trees; one line with layer, reason and fix.

    """
    layers = target_layers(vllm_config)
    for name, layer in layers.items():
        check_layer(name, layer)
    words = set()
    for layer in layers.values():
        row = BACKENDS[layer.attn_backend.get_name()]
        words.add(row.words_of(layer.sliding_window))
        layer.attn_backend = tree_backend(layer.attn_backend)
        layer.impl.__class__ = row.load()
        layer.impl.tree_runtime = runtime
        if not row.latent:
            layer.impl.tree_variant = variant_of(layer, runtime.max_depth)
    return ", ".join(sorted(words))
