# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that are replaced, subclassed or used although they are not public."""

from packaging.specifiers import SpecifierSet

SUPPORTED_VLLM = SpecifierSet(">=0.32.0,<0.34", prereleases=True)

# module -> names that must exist there ("Class.member" for members).
SEAMS: dict[str, tuple[str, ...]] = {
    # Replaced.
    "vllm.engine.arg_utils": (
        "EngineArgs.create_speculative_config",
        "EngineArgs.create_engine_config",
        "EngineArgs.add_cli_args",
    ),
    "vllm.config.vllm": ("VllmConfig.num_lookahead_tokens", "VllmConfig.use_v2_model_runner"),
    "vllm.v1.worker.gpu.spec_decode": ("init_speculator",),
    "vllm.v1.worker.gpu.model_states": ("init_model_state", "resolve_model_state_cls"),
    "vllm.v1.worker.gpu.model_runner": (
        "GPUModelRunner.load_model",
        "GPUModelRunner.sample",
        "GPUModelRunner.postprocess_sampled",
        "GPUModelRunner.execute_model",
        "GPUModelRunner.get_draft_model",
        "GPUModelRunner.sample_tokens",
        "sort_batch_req_ids",
    ),
    "vllm.v1.engine.core": ("EngineCore.__init__", "EngineCore._initialize_kv_caches"),
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.update_from_output",
        "Scheduler.make_spec_decoding_stats",
        "Scheduler.make_stats",
        "Scheduler.finish_requests",
    ),
    "vllm.v1.worker.gpu.async_utils": ("AsyncOutput.get_output",),
    "vllm.v1.metrics.loggers": (
        "StatLoggerManager.__init__",
        "StatLoggerManager.record",
        "LoggingStatLogger",
        "PrometheusStatLogger._counter_cls",
        "PrometheusStatLogger._gauge_cls",
    ),
    "vllm.v1.spec_decode.metrics": (
        "SpecDecodingProm.__init__",
        "SpecDecodingLogging.observe",
        "SpecDecodingLogging.log",
        "SpecDecodingLogging.reset",
        "SpecDecodingStats.num_accepted_tokens_per_pos",
    ),
    "vllm.v1.worker.gpu_worker": ("Worker.sleep", "Worker.wake_up"),
    # Subclassed.
    "vllm.config.speculative": (
        "SpeculativeConfig.max_num_new_slots_for_drafting",
        "SpeculativeConfig.compute_hash",
        "SpeculativeConfig.use_dflash",
    ),
    "vllm.v1.worker.gpu.model_states.interface": (
        "ModelState.prepare_inputs",
        "ModelState.prepare_dummy_inputs",
        "ModelState.prepare_attn",
        "ModelState.postprocess_state",
        "ModelState.custom_sampler",
        "ModelState.add_request",
        "ModelState.apply_staged_writes",
        "ModelState.initialize_kv_cache",
    ),
    "vllm.v1.worker.gpu.model_states.default": ("DefaultModelState.prepare_attn",),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator": (
        "DFlashSpeculator._generate_draft",
        "DFlashSpeculator._run_model",
        "DFlashSpeculator._num_graph_context_tokens",
        "DFlashSpeculator.init_cudagraph_manager",
        "DFlashSpeculator.propose",
        "DFlashSpeculator.set_attn",
    ),
    "vllm.v1.worker.gpu.spec_decode.speculator": ("DraftModelSpeculator.load_model",),
    "vllm.v1.worker.gpu.spec_decode.dflash.cudagraph": ("DFlashCudaGraphManager.capture",),
    "vllm.v1.worker.gpu.cudagraph_utils": (
        "CudaGraphManager._init_candidates",
        "CudaGraphManager.run_fullgraph",
        "ModelCudaGraphManager.capture",
        "build_dynamic_sd_schedule_lookup",
    ),
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler": (
        "gather_draft_sampled",
        "get_max_chunk_logits",
        "_iter_request_chunks",
    ),
    # Used as they are.
    "vllm.v1.core.kv_cache_manager": (
        "KVCacheManager.get_block_ids",
        "KVCacheManager.evict_blocks",
    ),
    "vllm.v1.engine": ("EngineCoreOutput", "EngineCoreOutputs.outputs"),
    "vllm.v1.request": ("RequestStatus.FINISHED_ERROR",),
    "vllm.outputs": ("RequestError.message",),
    "vllm.v1.worker.gpu.sample.sampler": ("Sampler.sample", "Sampler.get_logprobs_dims"),
    "vllm.v1.worker.gpu.sample.logprob": ("compute_topk_scores",),
    "vllm.v1.worker.gpu.input_batch": ("get_num_sampled_and_rejected", "InputBatch"),
    "vllm.v1.worker.gpu.sample.output": ("SamplerOutput",),
    "vllm.v1.worker.gpu.metrics.logits": ("get_num_nans",),
    "vllm.v1.worker.gpu.buffer_utils": ("UvaBackedTensor",),
    "vllm.v1.attention.backends.flash_attn": (
        "FlashAttentionBackend",
        "FlashAttentionImpl.forward",
        "FlashAttentionMetadataBuilder.build",
        "FlashAttentionMetadataBuilder._get_scheduler_metadata",
    ),
    "vllm.v1.attention.backends.triton_attn": (
        "TritonAttentionBackend",
        "TritonAttentionImpl.forward",
        "TritonAttentionMetadataBuilder.build",
    ),
    "vllm.v1.attention.backends.cpu_attn": (
        "CPUAttentionBackend",
        "CPUAttentionBackendImpl.forward",
        "CPUAttentionBackendImpl.do_kv_cache_update",
    ),
    "vllm.v1.attention.backends.mla.triton_mla": (
        "TritonMLABackend",
        "TritonMLAImpl.forward_mqa",
        "TritonMLAMetadataBuilder",
    ),
    "vllm.v1.attention.backends.mla.flashattn_mla": (
        "FlashAttnMLABackend",
        "FlashAttnMLAImpl.forward_mqa",
        "FlashAttnMLAMetadataBuilder._build_decode",
        "FlashAttnMLAMetadataBuilder._schedule_decode",
    ),
    "vllm.v1.attention.backends.mla.flashmla": (
        "FlashMLABackend",
        "FlashMLAImpl.forward_mqa",
        "FlashMLAMetadataBuilder",
    ),
    "vllm.v1.attention.ops.flashmla": ("flash_mla_with_kvcache",),
    "vllm.v1.attention.selector": ("get_attn_backend",),
    "vllm.model_executor.layers.attention.mla_attention": (
        "MLAAttention",
        "MLACommonMetadataBuilder.build",
        "MLACommonMetadataBuilder.reorder_batch_threshold",
        "MLACommonMetadataBuilder.query_len_support",
        "QueryLenSupport",
        "split_decodes_and_prefills",
    ),
    "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils": ("get_eagle3_aux_layers_from_config",),
    "vllm.v1.worker.gpu.spec_decode.utils": ("get_parallel_drafting_token_id",),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase.is_draft_layer",),
    "vllm.model_executor.layers.attention.attention": ("Attention",),
}
