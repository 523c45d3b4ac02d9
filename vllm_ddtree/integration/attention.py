# SPDX-License-Identifier: Apache-2.0
"""Attention backends: which one vLLM takes, and what it plans and reserves for it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def reserve_mla_workspace(
    vllm_config: Any, max_rows: int, num_heads: int, kv_lora_rank: int
) -> None:
    """Reserve the scratch of vLLM's Triton MLA decode kernel for so many rows (vLLM 0.33)."""
    from vllm.v1.attention.backends.mla import triton_mla

    triton_mla._reserve_attn_logits_workspace(vllm_config, max_rows, num_heads, kv_lora_rank)


def target_backend(vllm_config: Any, asked: str | None) -> str | None:
    """The attention backend that vLLM gives a target, its layers' own traits aside.

    Args:
        vllm_config: the engine's; its own backend is not read.
        asked: a backend's name, None: vLLM's own choice.

    Returns:
        Its name (a platform may give another than was asked for), None if there is none.

    """
    from vllm.config.vllm import set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import get_attn_backend

    model, attention = vllm_config.model_config, vllm_config.attention_config
    before = attention.backend
    attention.backend = AttentionBackendEnum[asked] if asked else None
    try:
        with set_current_vllm_config(vllm_config):
            # As vLLM's layers ask (model_executor/layers/attention/: attention, mla_attention).
            backend: Any = get_attn_backend(
                model.get_head_size(),
                model.dtype,
                vllm_config.cache_config.cache_dtype,
                use_mla=model.use_mla,
                num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
            )
    except ValueError:
        return None
    finally:
        attention.backend = before
    return backend.get_name()


def draft_backend_error(vllm_config: Any, head_size: int, non_causal: bool) -> str | None:
    """Why vLLM has no attention backend for a drafter, as it asks for it; None: it has one.

    As in v1/worker/gpu/spec_decode/dflash/utils.py, `load_dflash_model`.
    """
    from vllm.config import replace
    from vllm.config.vllm import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    spec = vllm_config.speculative_config
    view = copy.copy(vllm_config)
    view.attention_config = replace(
        vllm_config.attention_config, use_non_causal=non_causal, backend=spec.attention_backend
    )
    try:
        with set_current_vllm_config(view):
            backend: Any = get_attn_backend(
                head_size,
                vllm_config.model_config.dtype,
                spec.kv_cache_dtype or vllm_config.cache_config.cache_dtype,
            )
    except ValueError as error:
        return " ".join(str(error).split())
    if backend.supports_head_size(head_size):
        return None
    return f"{backend.get_name()} takes {backend.get_supported_head_sizes()}"


def plans_ahead(builder: type) -> bool:
    """Whether a metadata builder plans its kernel's work (FlashAttention's scheduler metadata)."""
    return hasattr(builder, "_get_scheduler_metadata")


def quant_scales(layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales of a layer's queries, keys and values: float32, one element each, or Hkv."""
    return layer._q_scale, layer._k_scale, layer._v_scale


def latent_scale(layer: Any) -> torch.Tensor:
    """The scale of a layer's latent cache: float32, one element."""
    return layer._k_scale


def host_cache_scales(layer: Any) -> tuple[float, float]:
    """A layer's scales of keys and values as numbers on the host: one for all heads."""
    return layer._k_scale_float, layer._v_scale_float


def impl_config(impl: Any) -> VllmConfig:
    """The configuration that TRITON_MLA's implementation was made with (vLLM 0.33)."""
    return impl._vllm_config
