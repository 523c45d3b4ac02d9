# SPDX-License-Identifier: Apache-2.0
"""What an engine with `method: ddtree` must be, checked before weights load.

Whatever is not built is refused here by name, never silently replaced.
"""

from typing import Any

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_ddtree import integration
from vllm_ddtree.attention.registry import FP8_CACHES, one_of, supported
from vllm_ddtree.budget.tiers import TIERS
from vllm_ddtree.config.speculative import DDTreeConfig
from vllm_ddtree.graphs.sizes import (
    MAX_AUTO_TOKENS,
    MAX_VERIFY_TOKENS,
    auto_sizes,
    verify_sizes,
)

logger = init_logger("vllm.ddtree")


def _refuse(flag: str, value: Any, fix: str) -> None:
    raise ValueError(f"method ddtree does not support {flag}={value}: {fix}")


def check_engine_args(engine_args: Any) -> None:
    """Raise ValueError for what vLLM itself would refuse with advice that misleads here."""
    if engine_args.enable_lora:
        _refuse("--enable-lora", True, "leave it out")


def check_engine_config(engine_args: Any, vllm_config: Any) -> None:
    """Raise ValueError, in one line with flag, value and fix, for an engine DDTree cannot run.

    Args:
        engine_args: vLLM's EngineArgs, as the user gave them.
        vllm_config: the VllmConfig made from them.

    """
    spec: DDTreeConfig = vllm_config.speculative_config
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not vllm_config.use_v2_model_runner:
        if envs.VLLM_USE_V2_MODEL_RUNNER is False:
            _refuse("the V1 model runner, VLLM_USE_V2_MODEL_RUNNER", 0, "unset it")
        raise ValueError(
            "method ddtree needs vLLM's Model Runner V2, and vLLM has chosen the V1 runner: its "
            "warning above, 'Model Runner V2 ...', says why; drop what it names (without a GPU: "
            "set the variables of cpu/README.md)"
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
        # vLLM makes a KV transfer of an offload.
        ("--kv-offloading-size", vllm_config.cache_config.kv_offloading_size),
        ("--kv-transfer-config", vllm_config.kv_transfer_config is not None),
        ("--kv-sharing-fast-prefill", vllm_config.cache_config.kv_sharing_fast_prefill),
        (
            "--enable-return-routed-experts or --aux-output-config",
            vllm_config.aux_output_config.enabled,
        ),
        ("--enable-trace-replay", model.enable_trace_replay),
        ("--return-sampling-mask", model.return_sampling_mask),
        ("--watermark-config", vllm_config.watermark_config is not None),
        ("--enable-prompt-embeds", model.enable_prompt_embeds),
        (
            "--compilation-config pass_config.fuse_attn_quant",
            vllm_config.compilation_config.pass_config.fuse_attn_quant,
        ),
    ):
        if value:
            _refuse(flag, value, "leave it out")
    backend = vllm_config.attention_config.backend
    if model.use_mla:
        _choose_mla_backend(vllm_config)
    elif backend is None:
        _replace_choice(vllm_config, supported(latent=False, chosen=True), "multi-head attention")
    elif backend.name not in supported(latent=False):
        fix = f"use {one_of(supported(latent=False, chosen=True)[:2])}"
        _refuse("--attention-backend", backend.name, fix)
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in ("auto", str(model.dtype).removeprefix("torch."), *FP8_CACHES):
        _refuse("--kv-cache-dtype", cache_dtype, "leave it at auto or set it to fp8")
    half = (spec.kv_cache_dtype or cache_dtype) in FP8_CACHES and model.dtype == torch.float16
    if half and fa_utils.get_flash_attn_version() == 3:
        # vLLM starts, and stops in its first step (vllm-flash-attn, hopper/flash_api.cpp).
        what = "FlashAttention 3, on which the drafter runs, gives bfloat16 for an fp8 cache"
        _refuse("--dtype", "float16", f"{what}; use bfloat16, or no --kv-cache-dtype")
    _check_token_budget(engine_args, vllm_config, spec)
    _plan_graphs(engine_args, vllm_config, spec)


def _choose_mla_backend(vllm_config: Any) -> None:
    """A supported backend for a target with multi-head latent attention: what the user named, what
    vLLM would choose, or the best that vLLM takes on this platform.
    """
    attention, name = vllm_config.attention_config, vllm_config.model_config.model
    cache_dtype = vllm_config.cache_config.cache_dtype
    names = supported(latent=True, cache_dtype=cache_dtype)
    what = "multi-head latent attention"
    if cache_dtype in FP8_CACHES:
        what = f"{what} and --kv-cache-dtype={cache_dtype}"
    if attention.backend is not None:
        if attention.backend.name not in names:
            raise ValueError(
                f"method ddtree does not support --attention-backend={attention.backend.name} for "
                f"target {name!r}, which has {what}: use {one_of(names)}, or leave it out"
            )
        return
    attention.backend = AttentionBackendEnum[_replace_choice(vllm_config, names, what)]


def _replace_choice(vllm_config: Any, names: tuple[str, ...], what: str) -> str:
    """Set the first of the named backends that vLLM takes, where its own choice is none of them.

    Returns the backend that it will be.
    """
    own = integration.target_backend(vllm_config, None)
    if own in names:
        return own
    fitting = [b for b in names if integration.target_backend(vllm_config, b) == b]
    if not fitting:
        raise ValueError(
            f"method ddtree does not support target {vllm_config.model_config.model!r} on this "
            f"device: it has {what}, for which vLLM has {own or 'no backend'} here, and not "
            f"{one_of(names)}; use method dflash"
        )
    logger.warning(
        "ddtree: trees cannot be verified on vLLM's choice %s; using --attention-backend=%s",
        own,
        fitting[0],
    )
    vllm_config.attention_config.backend = AttentionBackendEnum[fitting[0]]
    return fitting[0]


def _plan_graphs(engine_args: Any, vllm_config: Any, spec: DDTreeConfig) -> None:
    """Verify graphs for every budget and number of requests, unless the user has set the sizes."""
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    asked = engine_args.compilation_config
    names = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    if not compilation.cudagraph_capture_sizes or any(
        getattr(asked, name, None) or getattr(engine_args, name, None) for name in names
    ):
        return
    tokens = scheduler.max_num_batched_tokens
    if spec.auto_budget:
        widest = min(tokens, scheduler.max_num_seqs * (spec.budget + 1))
        rows = [budget + 1 for budget in TIERS]
        sizes = auto_sizes(min(widest, MAX_AUTO_TOKENS), rows, scheduler.max_num_seqs)
    else:
        schedule = spec.num_speculative_tokens_per_batch_size
        ranges = schedule or [(1, scheduler.max_num_seqs, spec.budget)]
        limit = scheduler.max_num_seqs
        tiers = [(nodes + 1, min(last, limit)) for first, last, nodes in ranges if first <= limit]
        sizes = verify_sizes(
            compilation.cudagraph_capture_sizes, tiers, min(tokens, MAX_VERIFY_TOKENS)
        )
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = sizes[-1]


def _check_target(model: Any) -> None:
    """Refuse targets whose attention or state cannot follow a tree."""
    name = model.model
    hybrid = model.is_hybrid or model.is_attention_free
    for bad, what in (
        (hybrid, "recurrent layers (Mamba, gated delta net)"),
        (model.is_encoder_decoder, "an encoder"),
        (hasattr(model.hf_text_config, "index_topk"), "sparse latent attention (an indexer)"),
        (getattr(model, "uses_mrope", False), "positions of several axes (M-RoPE)"),
        (getattr(model, "rswa_window", None) is not None, "reference sliding-window attention"),
    ):
        if bad:
            raise ValueError(
                f"method ddtree does not support target {name!r}: it has {what}; use method dflash"
            )


def _check_token_budget(engine_args: Any, vllm_config: Any, spec: DDTreeConfig) -> None:
    """A verify step of one request, and the draft forward of all, must fit a batch."""
    scheduler = vllm_config.scheduler_config
    tokens, rows = scheduler.max_num_batched_tokens, spec.budget + 1
    budget, lower = f"budget={spec.budget}", "lower budget"
    if spec.auto_budget:
        budget, lower = f"budget=auto (up to {spec.budget})", "set budget to a number"
    # vLLM 0.32 takes the draft's slots off every request's share of a batch.
    slots = spec.max_num_new_slots_for_drafting
    needed = max(rows + slots, spec.block_size)
    if tokens < needed:
        raise ValueError(
            f"--max-num-batched-tokens={tokens} is too small for method ddtree with "
            f"{budget}: a request needs {needed} tokens a step; raise it to at least {needed} or "
            f"{lower}"
        )
    for flag, value in (
        ("--max-num-scheduled-tokens", scheduler.max_num_scheduled_tokens),
        ("--long-prefill-token-threshold", scheduler.long_prefill_token_threshold),
    ):
        if value and value < rows:
            raise ValueError(
                f"{flag}={value} is too small for method ddtree with {budget}: a request verifies "
                f"{rows} tokens a step; leave it out, raise it to at least {rows} or {lower}"
            )
    # The draft forward of a full batch runs in buffers of max_num_batched_tokens.
    fitting = tokens // spec.block_size
    if hasattr(scheduler, "max_num_active_seqs"):
        # vLLM has lowered it as if every request drafted its lookahead, budget + 1 tokens.
        asked = engine_args.max_num_active_seqs or scheduler.max_num_seqs
        scheduler.max_num_active_seqs = min(asked, fitting)
    elif scheduler.max_num_seqs > fitting:
        raise ValueError(
            f"--max-num-seqs={scheduler.max_num_seqs} with the drafter's "
            f"block_size={spec.block_size} needs {scheduler.max_num_seqs * spec.block_size} draft "
            f"tokens a step, more than --max-num-batched-tokens={tokens}: raise it to at least "
            f"{scheduler.max_num_seqs * spec.block_size} or lower --max-num-seqs to {fitting}"
        )
