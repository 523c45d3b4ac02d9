# SPDX-License-Identifier: Apache-2.0
"""What an engine must be whose requests share the nodes of a step (`mean_budget`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode

from vllm_ddtree import integration
from vllm_ddtree.attention.registry import BACKENDS, one_of
from vllm_ddtree.config.errors import bad_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_ddtree.config.speculative import DDTreeConfig


def check_sharing(vllm_config: VllmConfig) -> None:
    """Raise ValueError for an engine that needs to know on the host what each request verifies.

    Args:
        vllm_config: the attention backend and the CUDA graphs chosen.

    """
    spec: DDTreeConfig = vllm_config.speculative_config
    if spec.mean_budget is None:
        return
    model, aux = vllm_config.model_config, vllm_config.aux_output_config
    for bad, what in (
        (model.is_hybrid, "a target with recurrent layers"),
        (model.use_mla, "a target with multi-head latent attention"),
        (vllm_config.lora_config is not None, "--enable-lora"),
        (vllm_config.kv_transfer_config is not None, "--kv-transfer-config or KV offloading"),
        (model.return_sampling_mask, "--return-sampling-mask"),
        (aux.enable_return_routed_experts, "--enable-return-routed-experts"),
    ):
        if bad:
            raise bad_key("mean_budget", spec.mean_budget, f"leave it out with {what}")
    if vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
        how = "give --enforce-eager; CUDA graphs have requests of one length"
        raise bad_key("mean_budget", spec.mean_budget, how)
    named = vllm_config.attention_config.backend
    backend = integration.target_backend(vllm_config, named.name if named else None)
    shares = tuple(row.name for row in BACKENDS.values() if row.shares)
    if backend not in shares:
        how = f"use --attention-backend={one_of(shares)}, not {backend}"
        raise bad_key("mean_budget", spec.mean_budget, how)
