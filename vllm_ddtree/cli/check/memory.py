# SPDX-License-Identifier: Apache-2.0
"""Memory of a pair on each GPU, as far as configurations tell: an estimate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from vllm_ddtree.cli.check.findings import Finding, State

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.parallel import ParallelConfig

KIB, MIB = 2**10, 2**20


def memory(vllm_config: VllmConfig) -> Iterator[Finding]:
    """What a token and a request take. Weights are not counted."""
    spec: Any = vllm_config.speculative_config
    cache = vllm_config.cache_config.cache_dtype
    target = kv_bytes(vllm_config.model_config, vllm_config.parallel_config, cache)
    drafter = kv_bytes(
        spec.draft_model_config, spec.draft_parallel_config, spec.kv_cache_dtype or cache
    )
    yield Finding(
        "KV cache",
        State.NOTE,
        f"about {target / KIB:.1f} KiB a token of the target and {drafter / KIB:.1f} KiB of the "
        "drafter, on each GPU; layers with a window keep less",
    )
    if vllm_config.model_config.is_hybrid:
        yield _states(vllm_config)


def kv_bytes(model: ModelConfig, parallel: ParallelConfig, cache_dtype: str) -> int:
    """Bytes of one token's keys and values on one rank, all attention layers together."""
    # Configurations with a block type for each layer call it by either name.
    kinds: tuple[Any, ...] = ("attention", "full_attention")
    layers = max(model.get_num_layers_by_block_type(parallel, kind) for kind in kinds)
    # A latent layer keeps one vector a token, which serves as keys and values.
    vectors = 1 if model.use_mla else 2 * model.get_num_kv_heads(parallel)
    item = 1 if cache_dtype.startswith("fp8") else model.dtype.itemsize
    return layers * vectors * model.get_head_size() * item


def state_bytes(vllm_config: VllmConfig) -> tuple[int, int]:
    """Recurrent layers of one rank, and bytes of one request's states in all of them."""
    from vllm.model_executor.models import ModelRegistry

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    kinds: Any = ModelRegistry.resolve_model_cls(model.architectures, model_config=model)[0]
    spec, vllm_config.speculative_config = vllm_config.speculative_config, None
    try:  # without drafts: vLLM would count a window of inputs for each of them
        shapes = kinds.get_mamba_state_shape_from_config(vllm_config)
    finally:
        vllm_config.speculative_config = spec
    dtypes = kinds.get_mamba_state_dtype_from_config(vllm_config)
    one = sum(
        torch.Size(shape).numel() * dtype.itemsize
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    recurrent: tuple[Any, ...] = ("linear_attention", "mamba")
    layers = sum(model.get_num_layers_by_block_type(parallel, kind) for kind in recurrent)
    return layers, layers * one


def _states(vllm_config: VllmConfig) -> Finding:
    """States of the recurrent layers: one a request, whatever the budget."""
    from vllm_ddtree.recurrent.capacity import max_tree_rows

    layers, size = state_bytes(vllm_config)
    return Finding(
        "states",
        State.NOTE,
        f"{layers} recurrent layers, about {size / MIB:.1f} MiB a request on each GPU, "
        f"whatever the budget; a step holds at most {max_tree_rows(vllm_config)} tree rows",
    )
