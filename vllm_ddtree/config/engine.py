# SPDX-License-Identifier: Apache-2.0
"""What an engine with `method: ddtree` must be, checked before weights load.

Whatever is not built is refused here by name, never silently replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm import envs
from vllm.v1.attention.backends import fa_utils

from vllm_ddtree.attention.registry import FP8_CACHES
from vllm_ddtree.config.attention import fitting_backend, set_attention_backend
from vllm_ddtree.config.drafter import check_weights
from vllm_ddtree.config.errors import bad_flag
from vllm_ddtree.config.graphs import set_capture_sizes
from vllm_ddtree.config.sharing import check_sharing
from vllm_ddtree.config.speculative import DDTreeConfig
from vllm_ddtree.config.target import check_target
from vllm_ddtree.config.token_budget import (
    check_token_budget,
    explain_advice,
    set_active_requests,
    set_fitting_schedule,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs


def check_watermark(engine_args: EngineArgs) -> None:
    """Raise ValueError for watermarks, which vLLM refuses with advice that does not help here."""
    if engine_args.watermark_config is not None:
        raise bad_flag(
            "--watermark-config",
            "{...}",  # it holds a secret
            "leave it out; vLLM watermarks only drafts of one token after another, and none of "
            "method dflash either",
        )


def check_adapters(engine_args: EngineArgs, spec: SpeculativeConfig) -> None:
    """Raise ValueError where vLLM refuses LoRA for want of tokens in a step.

    vLLM demands a step that holds the verify rows of all running requests
    (`EngineArgs.create_engine_config`), and its words name keys that do not exist here.

    Args:
        engine_args: as far as vLLM has completed them when it refused.
        spec: made from them.

    """
    tokens, limit = engine_args.max_num_batched_tokens, engine_args.max_num_seqs
    if not (engine_args.enable_lora and isinstance(spec, DDTreeConfig) and tokens and limit):
        return
    needed = limit * (spec.budget + 1)
    if tokens >= needed:
        return
    budget = f"auto (up to {spec.budget})" if spec.auto_budget else spec.budget
    ways = [f"raise it to {needed}"]
    if tokens > spec.budget:
        ways.append(f"lower --max-num-seqs to {tokens // (spec.budget + 1)}")
    if tokens >= 2 * limit:
        ways.append(f"set budget to {tokens // limit - 1} or less")
    raise ValueError(
        f"--max-num-batched-tokens={tokens} is too small for --enable-lora with method ddtree, "
        f"budget={budget} and --max-num-seqs={limit}: {', or '.join(ways)}"
    )


def finish_engine_config(engine_args: EngineArgs, vllm_config: VllmConfig) -> None:
    """Check a whole configuration, then change the settings that DDTree chooses.

    These are the attention backend, the most running requests and the sizes of CUDA graphs.

    Args:
        engine_args: as the user gave them.
        vllm_config: made from them; changed.

    Raises:
        ValueError: DDTree cannot run this engine; one line with flag, value and fix.

    """
    _check_method(vllm_config.speculative_config)
    _check_runner(vllm_config)
    check_target(vllm_config.model_config)
    _check_settings(vllm_config)
    backend = fitting_backend(vllm_config)
    _check_cache_dtype(vllm_config)
    check_token_budget(vllm_config)
    set_attention_backend(vllm_config, backend)
    set_active_requests(engine_args, vllm_config)
    set_fitting_schedule(vllm_config)
    set_capture_sizes(engine_args, vllm_config)
    check_sharing(vllm_config)
    check_weights(vllm_config)
    explain_advice(vllm_config)


def _check_method(spec: SpeculativeConfig | None) -> None:
    """Refuse a finished configuration in which vLLM has made another method of ddtree."""
    if isinstance(spec, DDTreeConfig):
        return
    became = "none" if spec is None else f"{spec.method!r} with drafter {spec.model!r}"
    raise ValueError(
        f"method ddtree was asked for, and vLLM made {became} of it: give the target as --model "
        "and the drafter as 'model' of --speculative-config"
    )


def _check_runner(vllm_config: VllmConfig) -> None:
    """Refuse the V1 model runner."""
    if vllm_config.use_v2_model_runner:
        return
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise bad_flag("the V1 model runner, VLLM_USE_V2_MODEL_RUNNER", 0, "unset it")
    raise ValueError(
        "method ddtree needs vLLM's Model Runner V2, and vLLM has chosen the V1 runner: its "
        "warning above, 'Model Runner V2 ...', says why; drop what it names (without a GPU: "
        "set the variables of cpu/README.md)"
    )


def _check_settings(vllm_config: VllmConfig) -> None:
    """Refuse parallelism and features that trees do not support."""
    parallel = vllm_config.parallel_config
    compilation = vllm_config.compilation_config
    for flag, value, one in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size, 1),
        ("--data-parallel-size", parallel.data_parallel_size, 1),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size, 1),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size, 1),
    ):
        if value != one:
            raise bad_flag(flag, value, f"set it to {one}")
    for flag, value in (
        ("--enable-dbo", parallel.enable_dbo),
        ("--enable-batch-sharded-sampling", parallel.enable_batch_sharded_sampling),
        (
            "--compilation-config pass_config.fuse_attn_quant",
            compilation.pass_config.fuse_attn_quant,
        ),
    ):
        if value:
            raise bad_flag(flag, value, "leave it out")
    if vllm_config.model_config.is_hybrid and vllm_config.kv_transfer_config is not None:
        # States behind a path are written after the step's keys and values have been handed over.
        what = "for a target with recurrent layers"
        raise bad_flag(f"--kv-transfer-config or --kv-offloading-size {what}", True, "leave it out")


def _check_cache_dtype(vllm_config: VllmConfig) -> None:
    """Refuse KV caches in which trees, or vLLM's drafts, cannot be kept."""
    spec: DDTreeConfig = vllm_config.speculative_config
    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    if cache_dtype not in ("auto", str(dtype).removeprefix("torch."), *FP8_CACHES):
        raise bad_flag("--kv-cache-dtype", cache_dtype, "leave it at auto or set it to fp8")
    half = (spec.kv_cache_dtype or cache_dtype) in FP8_CACHES and dtype == torch.float16
    if half and fa_utils.get_flash_attn_version() == 3:
        # vLLM starts, and stops in its first step (vllm-flash-attn, hopper/flash_api.cpp).
        what = "FlashAttention 3, on which the drafter runs, gives bfloat16 for an fp8 cache"
        raise bad_flag("--dtype", "float16", f"{what}; use bfloat16, or no --kv-cache-dtype")
