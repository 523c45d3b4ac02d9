# SPDX-License-Identifier: Apache-2.0
"""What an engine with `method: ddtree` must be, checked before weights load.

Whatever is not built is refused here by name, never silently replaced.
"""

from typing import Any

from vllm_ddtree.config import DDTreeConfig
from vllm_ddtree.graphs.sizes import auto_sizes

SUPPORTED_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
UNQUANTIZED_CACHE = ("auto", "bfloat16", "float16", "float32")


def _refuse(flag: str, value: Any, fix: str) -> None:
    raise ValueError(f"method ddtree does not support {flag}={value}: {fix}")


def check_engine_config(engine_args: Any, vllm_config: Any) -> None:
    """Raise ValueError, in one line with flag, value and fix, for an engine DDTree cannot run.

    Args:
        engine_args: vLLM's EngineArgs, as the user gave them.
        vllm_config: the VllmConfig made from them.

    """
    spec: DDTreeConfig = vllm_config.speculative_config
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not vllm_config.use_v2_model_runner:
        _refuse(
            "the V1 model runner, VLLM_USE_V2_MODEL_RUNNER",
            0,
            "unset it, and drop what keeps vLLM from Model Runner V2 (see its warning above)",
        )
    _check_target(model)
    for flag, value, one in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size, 1),
        ("--data-parallel-size", parallel.data_parallel_size, 1),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size, 1),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size, 1),
    ):
        if value != one:
            _refuse(flag, value, f"set it to {one}")
    for flag, value in (
        ("--enable-dbo", parallel.enable_dbo),
        ("--enable-batch-sharded-sampling", parallel.enable_batch_sharded_sampling),
        ("--enable-lora", vllm_config.lora_config is not None),
        ("--kv-transfer-config", vllm_config.kv_transfer_config is not None),
        ("--kv-sharing-fast-prefill", vllm_config.cache_config.kv_sharing_fast_prefill),
        ("--enable-return-routed-experts", getattr(model, "enable_return_routed_experts", False)),
        ("--enable-trace-replay", getattr(model, "enable_trace_replay", False)),
        ("--return-sampling-mask", getattr(model, "return_sampling_mask", False)),
        ("--watermark-config", getattr(vllm_config, "watermark_config", None) is not None),
        ("--enable-prompt-embeds", model.enable_prompt_embeds),
    ):
        if value:
            _refuse(flag, value, "leave it out")
    backend = vllm_config.attention_config.backend
    if backend is not None and backend.name not in SUPPORTED_BACKENDS:
        _refuse("--attention-backend", backend.name, f"use {' or '.join(SUPPORTED_BACKENDS[:2])}")
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in UNQUANTIZED_CACHE:
        _refuse("--kv-cache-dtype", cache_dtype, "leave it at auto")
    _check_token_budget(vllm_config, spec)
    if spec.auto_budget:
        _plan_graphs(engine_args, vllm_config.compilation_config)


def _plan_graphs(engine_args: Any, compilation: Any) -> None:
    """Few verify graphs for many budgets, unless the user has set the sizes."""
    asked = engine_args.compilation_config
    chosen = getattr(asked, "cudagraph_capture_sizes", None) or engine_args.cudagraph_capture_sizes
    if chosen is None and compilation.cudagraph_capture_sizes:
        compilation.cudagraph_capture_sizes = auto_sizes(compilation.max_cudagraph_capture_size)
        compilation.max_cudagraph_capture_size = compilation.cudagraph_capture_sizes[-1]


def _check_target(model: Any) -> None:
    """Refuse targets whose attention or state cannot follow a tree."""
    name = model.model
    hybrid = model.is_hybrid or model.is_attention_free
    for bad, what in (
        (hybrid, "recurrent layers (Mamba, gated delta net)"),
        (model.use_mla, "multi-head latent attention"),
        (model.is_encoder_decoder, "an encoder"),
        (getattr(model, "uses_mrope", False), "positions of several axes (M-RoPE)"),
        (getattr(model, "rswa_window", None) is not None, "reference sliding-window attention"),
        (model.get_sliding_window() is not None, "sliding-window attention"),
    ):
        if bad:
            raise ValueError(
                f"method ddtree does not support target {name!r}: it has {what}; use method dflash"
            )


def _check_token_budget(vllm_config: Any, spec: DDTreeConfig) -> None:
    """A verify step and a draft block of one request at least must fit a batch."""
    scheduler = vllm_config.scheduler_config
    tokens = scheduler.max_num_batched_tokens
    needed = max(spec.budget + 1, spec.block_size)
    if tokens < needed:
        raise ValueError(
            f"--max-num-batched-tokens={tokens} is too small for method ddtree with "
            f"budget={spec.budget}: a request needs {needed} tokens a step; raise it to at least "
            f"{needed} or lower budget"
        )
    # The draft forward of a full batch runs in buffers of max_num_batched_tokens.
    active = getattr(scheduler, "max_num_active_seqs", None) or scheduler.max_num_seqs
    if active * spec.block_size > tokens:
        raise ValueError(
            f"--max-num-seqs={active} with the drafter's block_size={spec.block_size} needs "
            f"{active * spec.block_size} draft tokens a step, more than "
            f"--max-num-batched-tokens={tokens}: raise it to at least {active * spec.block_size} "
            f"or lower --max-num-seqs to {tokens // spec.block_size}"
        )
