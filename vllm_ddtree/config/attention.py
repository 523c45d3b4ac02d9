# SPDX-License-Identifier: Apache-2.0
"""The attention backend of the target: the one named, vLLM's choice, or the best for trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_ddtree import integration
from vllm_ddtree.attention import registry
from vllm_ddtree.config.errors import bad_flag

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.ddtree")


def named_backend_hint() -> str:
    """The backends to name for a target with multi-head attention, in words."""
    return registry.one_of(registry.supported(latent=False, chosen=True)[:2])


def fitting_backend(vllm_config: VllmConfig) -> str | None:
    """The backend that the target needs; None: vLLM's choices for its layers will do.

    Raises:
        ValueError: the user named a backend that cannot verify trees, or vLLM has none here that
            can.

    """
    latent = vllm_config.model_config.use_mla
    named = vllm_config.attention_config.backend
    if named is not None:
        _check_named(named.name, vllm_config)
        return None
    own = integration.target_backend(vllm_config, None)
    if latent:
        cache_dtype = vllm_config.cache_config.cache_dtype
        choices, what = registry.supported(True, cache_dtype), _latent_words(cache_dtype)
    else:
        choices, what = registry.supported(False, chosen=True), "multi-head attention"
    if own in choices:
        # The layers of a target with latent attention have one backend, others may have several.
        return own if latent else None
    for name in choices:
        if integration.target_backend(vllm_config, name) == name:
            return name
    raise ValueError(
        f"method ddtree does not support target {vllm_config.model_config.model!r} on this "
        f"device: it has {what}, for which vLLM has {own or 'no backend'} here, and not "
        f"{registry.one_of(choices)}; use method dflash"
    )


def _latent_words(cache_dtype: str) -> str:
    """What a target with multi-head latent attention asks of a backend."""
    what = "multi-head latent attention"
    if cache_dtype in registry.FP8_CACHES:
        return f"{what} and --kv-cache-dtype={cache_dtype}"
    return what


def _check_named(name: str, vllm_config: VllmConfig) -> None:
    """Refuse a backend that the user named and that cannot verify trees."""
    model = vllm_config.model_config
    if not model.use_mla:
        if name not in registry.supported(False):
            raise bad_flag("--attention-backend", name, f"use {named_backend_hint()}")
        return
    cache_dtype = vllm_config.cache_config.cache_dtype
    choices = registry.supported(True, cache_dtype)
    if name not in choices:
        raise ValueError(
            f"method ddtree does not support --attention-backend={name} for target "
            f"{model.model!r}, which has {_latent_words(cache_dtype)}: use "
            f"{registry.one_of(choices)}, or leave it out"
        )


def set_attention_backend(vllm_config: VllmConfig, name: str | None) -> None:
    """Set the target's backend to what `fitting_backend` found; say so where vLLM's own differs."""
    if name is None:
        return
    own = integration.target_backend(vllm_config, None)
    if own != name:
        logger.warning(
            "ddtree: trees cannot be verified on vLLM's choice %s; using --attention-backend=%s",
            own,
            name,
        )
    vllm_config.attention_config.backend = AttentionBackendEnum[name]
