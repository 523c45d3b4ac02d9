# SPDX-License-Identifier: Apache-2.0
"""What a target must be, as far as its class and its loaded layers tell.

This runs in the workers. Its imports are too heavy for the process that makes the configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.attention.backend import AttentionType
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_ddtree.attention.install import target_layers
from vllm_ddtree.attention.registry import BACKENDS, FP8_CACHES, backend, one_of, supported
from vllm_ddtree.config.attention import named_backend_hint
from vllm_ddtree.config.errors import bad_flag, bad_layer, bad_target
from vllm_ddtree.recurrent.install import recurrent_layers
from vllm_ddtree.recurrent.kinds import KINDS

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig


def check_target_class(vllm_config: VllmConfig) -> None:
    """Raise ValueError for a target whose class does not give a drafter its hidden states.

    Imports the class, so it runs in the worker, before any weight is loaded.
    """
    target = get_model_cls(vllm_config.model_config)
    if not supports_eagle3(target):
        raise ValueError(
            f"method ddtree cannot use target {vllm_config.model_config.model!r}: "
            f"{target.__name__} gives no auxiliary hidden states to a DFlash drafter; "
            "use a target that method dflash supports"
        )


def check_loaded_target(vllm_config: VllmConfig, model: nn.Module) -> None:
    """Raise ValueError for a loaded target that needs a model state, or has an attention layer,
    that trees do not support.
    """
    base = resolve_model_state_cls(vllm_config, model)
    wanted = MambaHybridModelState if vllm_config.model_config.is_hybrid else DefaultModelState
    if base is not wanted:
        raise bad_target(
            vllm_config.model_config.model,
            f"it needs {base.__name__} (cross-attention or encoder layers)",
        )
    for name, layer in recurrent_layers(vllm_config).items():
        check_recurrent_layer(name, layer)
    for name, layer in target_layers(vllm_config).items():
        check_layer(name, layer)


def check_layer(name: str, layer: Any) -> None:
    """Raise ValueError for a target layer whose attention cannot be a tree's.

    Args:
        name: the layer's.
        layer: an attention layer of vLLM, its weights loaded.

    """
    if type(layer) is MLAAttention:
        _check_latent_layer(name, layer)
        return
    # Subclasses (chunked, prefix-LM, static sinks ...) change what a row sees behind this layer.
    if type(layer) is not Attention:
        kind = type(layer).__name__
        raise bad_layer(name, f"{kind} is neither plain multi-head nor latent attention")
    impl: Any = layer.impl
    if layer.attn_type != AttentionType.DECODER:
        raise bad_layer(name, f"attention type {layer.attn_type}")
    row = backend(layer.attn_backend.get_name())
    if row is None or row.latent or not isinstance(impl, row.base()):
        fix = f"set --attention-backend to {named_backend_hint()}"
        raise bad_layer(name, f"attention backend {layer.attn_backend.get_name()}", fix)
    if getattr(impl, "alibi_slopes", None) is not None:
        raise bad_layer(name, "ALiBi")
    if getattr(impl, "chunk_lookback", -1) > -1:
        raise bad_layer(name, "chunked attention")
    if layer.head_size_v != layer.head_size:
        raise bad_layer(name, "value heads of another size than key heads")
    if layer.kv_cache_torch_dtype != layer.dtype:
        _check_fp8_cache(name, layer)
    if layer.kv_sharing_target_layer_name is not None:
        raise bad_layer(name, "a KV cache shared with another layer")
    if getattr(impl, "fa4_hd256", False):
        fix = "set --attention-backend to TRITON_ATTN"
        raise bad_layer(name, "FlashAttention 4 with heads of 256", fix)


def check_recurrent_layer(name: str, layer: Any) -> None:
    """Raise ValueError for a recurrent layer of the target whose states cannot follow a tree.

    Args:
        name: the layer's.
        layer: a recurrent layer of vLLM, its weights loaded.

    """
    if type(layer) not in KINDS:
        kind = type(layer).__name__
        raise bad_layer(
            name,
            f"{kind} is no gated delta net as in Qwen3-Next and Qwen3.5, and no Mamba2 as in "
            "Nemotron-H",
        )
    if type(layer) is MambaMixer2:
        _check_mamba2_layer(layer)
    conv_dtype, state_dtype = layer.get_state_dtype()
    if conv_dtype != layer.model_config.dtype:
        raise bad_flag(
            "--mamba-cache-dtype", str(conv_dtype).removeprefix("torch."), "leave it out"
        )
    if not state_dtype.is_floating_point or state_dtype.itemsize < 2:
        raise bad_layer(name, f"states of {state_dtype}")
    _, value_dim, key_dim = layer.get_state_shape()[1]
    if max(key_dim, value_dim) > 256:
        raise bad_layer(name, f"heads of {key_dim} and {value_dim}")


def _check_mamba2_layer(layer: Any) -> None:
    """Refuse states of Mamba2 layers that are not those of the last token, or are not rounded."""
    if layer.use_replayssm:
        raise bad_flag("--use-replayssm", True, "leave it out")
    if layer.mamba_config.enable_stochastic_rounding:
        raise bad_flag("--enable-mamba-cache-stochastic-rounding", True, "leave it out")


def _check_latent_layer(name: str, layer: Any) -> None:
    """`check_layer` of a layer with multi-head latent attention."""
    if getattr(layer, "use_sparse", False) or getattr(layer.impl, "is_sparse", False):
        raise bad_layer(name, "sparse latent attention (an indexer)")
    row = backend(layer.attn_backend.get_name())
    if row is None or not row.latent or type(layer.impl) is not row.base():
        fix = f"set --attention-backend to {one_of(supported(latent=True))}"
        raise bad_layer(name, f"attention backend {layer.attn_backend.get_name()}", fix)
    if layer.sliding_window is not None:
        raise bad_layer(name, "latent attention with a sliding window")
    if layer.kv_cache_dtype not in ("auto", "float16", "bfloat16"):
        _check_fp8_cache(name, layer)


def _check_fp8_cache(name: str, layer: Any) -> None:
    """Refuse a quantised cache that the layer's backend cannot read for trees."""
    taken = BACKENDS[layer.attn_backend.get_name()].fp8_cache
    if not taken or layer.kv_cache_dtype not in FP8_CACHES:
        fix = "set --kv-cache-dtype to auto" + (" or fp8" if taken else "")
        raise bad_layer(name, f"KV cache dtype {layer.kv_cache_dtype}", fix)
