# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that are replaced, subclassed or used although they are not public."""

from packaging.specifiers import SpecifierSet

SUPPORTED_VLLM = SpecifierSet(">=0.32.0,<0.34", prereleases=True)

# module -> names that must exist there: "Class.member" for members, "function.attribute" for what a
# function gives its first parameter.
SEAMS: dict[str, tuple[str, ...]] = {
    # Configuration.
    "vllm.engine.arg_utils": (
        "EngineArgs.create_speculative_config",
        "EngineArgs.create_engine_config",
        "EngineArgs.add_cli_args",
    ),
    "vllm.config.vllm": (
        "VllmConfig.num_lookahead_tokens",
        "VllmConfig.use_v2_model_runner",
    ),
    "vllm.config.speculative": ("SpeculativeConfig.max_num_new_slots_for_drafting",),
    # Engine core and scheduler.
    "vllm.v1.engine.core": ("EngineCore.__init__",),
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.update_from_output",
        "Scheduler.make_spec_decoding_stats",
        "Scheduler.make_stats",
        "Scheduler.finish_requests",
        "Scheduler.schedule",
        "Scheduler.dynamic_sd_lookup",
        "Scheduler.kv_cache_manager",
        "Scheduler.log_stats",
        "Scheduler.num_spec_tokens",
        "Scheduler.requests",
        "Scheduler.spec_decode_metrics_level",
    ),
    "vllm.v1.core.sched.output": (
        "SchedulerOutput.make_empty",
        "SchedulerOutput.num_scheduled_tokens",
        "SchedulerOutput.total_num_scheduled_tokens",
        "SchedulerOutput.scheduled_spec_decode_tokens",
        "SchedulerOutput.num_invalid_spec_tokens",
        "SchedulerOutput.num_spec_tokens_to_schedule",
    ),
    "vllm.v1.core.kv_cache_manager": (
        "KVCacheManager.get_block_ids",
        "KVCacheManager.evict_blocks",
    ),
    "vllm.v1.request": ("RequestStatus.FINISHED_ERROR",),
    "vllm.v1.engine": (
        "EngineCoreOutput",
        "EngineCoreOutputs.outputs",
    ),
    "vllm.v1.outputs": ("ModelRunnerOutput.req_id_to_index",),
    "vllm.outputs": ("RequestError.message",),
    # Metrics.
    "vllm.v1.spec_decode.metrics": (
        "SpecDecodingProm.__init__",
        "SpecDecodingLogging.observe",
        "SpecDecodingLogging.log",
        "SpecDecodingLogging.reset",
        "SpecDecodingLogging.accepted_tokens_per_pos_lists",
        "SpecDecodingLogging.num_drafts",
        "SpecDecodingStats.num_accepted_tokens_per_pos",
    ),
    "vllm.v1.metrics.loggers": (
        "StatLoggerManager.__init__",
        "StatLoggerManager.record",
        "StatLoggerManager.stat_loggers",
        "LoggingStatLogger",
        "LoggingStatLogger.spec_decoding_logging",
        "PrometheusStatLogger._counter_cls",
        "PrometheusStatLogger._gauge_cls",
        "PrometheusStatLogger.per_engine_labelvalues",
    ),
    # Worker and model runner.
    "vllm.v1.worker.gpu_worker": (
        "Worker.sleep",
        "Worker.wake_up",
    ),
    "vllm.v1.worker.gpu.model_runner": (
        "GPUModelRunner.sample",
        "GPUModelRunner.execute_model",
        "GPUModelRunner.get_draft_model",
        "GPUModelRunner.sample_tokens",
        "GPUModelRunner.get_model",
        "GPUModelRunner.execute_model_state",
        "GPUModelRunner.cudagraph_manager",
        "GPUModelRunner.input_buffers",
        "GPUModelRunner.model",
        "GPUModelRunner.model_state",
        "GPUModelRunner.req_states",
        "GPUModelRunner.sampler",
        "GPUModelRunner.speculator",
        "sort_batch_req_ids",
        "ExecuteModelState.input_batch",
        "ExecuteModelState.attn_metadata",
        "ExecuteModelState.slot_mappings_by_layer",
        "ExecuteModelState.hidden_states",
        "ExecuteModelState.aux_hidden_states",
    ),
    "vllm.v1.worker.gpu.async_utils": (
        "AsyncOutput.get_output",
        "AsyncOutput.model_runner_output",
        "AsyncOutput.sampled_token_ids",
        "AsyncOutput.sampler_output",
    ),
    "vllm.v1.worker.gpu.states": (
        "RequestState.last_sampled_tokens",
        "RequestState.next_prefill_tokens",
        "RequestState.prefill_len",
    ),
    "vllm.v1.worker.gpu.input_batch": (
        "get_num_sampled_and_rejected",
        "InputBuffers.input_ids",
        "InputBatch.cu_num_logits",
        "InputBatch.cu_num_logits_np",
        "InputBatch.expanded_idx_mapping",
        "InputBatch.expanded_local_pos",
        "InputBatch.idx_mapping",
        "InputBatch.idx_mapping_np",
        "InputBatch.input_ids",
        "InputBatch.logits_indices",
        "InputBatch.num_reqs",
        "InputBatch.num_reqs_after_padding",
        "InputBatch.num_scheduled_tokens",
        "InputBatch.num_tokens",
        "InputBatch.num_tokens_after_padding",
        "InputBatch.positions",
        "InputBatch.query_start_loc",
        "InputBatch.req_ids",
        "InputBatch.seq_lens",
        "InputBatch.seq_lens_cpu_upper_bound",
    ),
    "vllm.v1.worker.gpu.buffer_utils": ("UvaBackedTensor",),
    "vllm.v1.worker.gpu.cudagraph_utils": (
        "CudaGraphManager._init_candidates",
        "CudaGraphManager.run_fullgraph",
        "CudaGraphManager.graphs",
        "CudaGraphManager._capture_descs",
        "CudaGraphManager._max_full_descs_to_capture",
        "ModelCudaGraphManager.capture",
        "build_dynamic_sd_schedule_lookup",
        "BatchExecutionDescriptor.num_tokens",
        "BatchExecutionDescriptor.num_reqs",
        "BatchExecutionDescriptor.uniform_token_count",
        "BatchExecutionDescriptor.num_active_loras",
    ),
    "vllm.v1.worker.gpu.model_states": (
        "init_model_state",
        "resolve_model_state_cls",
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
    # Drafter.
    "vllm.v1.worker.gpu.spec_decode": ("init_speculator",),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator": (
        "DFlashSpeculator._generate_draft",
        "DFlashSpeculator._run_model",
        "DFlashSpeculator._num_graph_context_tokens",
        "DFlashSpeculator.init_cudagraph_manager",
        "DFlashSpeculator.propose",
        "DFlashSpeculator.num_query_per_req",
        "DFlashSpeculator.query_cudagraph_manager",
        "DFlashSpeculator.sample_idx_mapping",
        "DFlashSpeculator.sample_indices",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.cudagraph": ("DFlashCudaGraphManager.capture",),
    "vllm.v1.worker.gpu.spec_decode.utils": ("get_parallel_drafting_token_id",),
    "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils": ("get_eagle3_aux_layers_from_config",),
    # Sampling.
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler": (
        "gather_draft_sampled",
        "get_max_chunk_logits",
        "_iter_request_chunks",
    ),
    "vllm.v1.worker.gpu.sample.sampler": (
        "Sampler.sample",
        "Sampler.get_logprobs_dims",
        "Sampler.compute_nans",
        "Sampler.logprob_token_ids_state",
        "Sampler.logprobs_mode",
        "Sampler.req_states",
        "Sampler.sampling_states",
        "Sampler.logits_processors",
    ),
    "vllm.v1.worker.gpu.sample.states": (
        "SamplingStates.seeds",
        "SamplingStates.temperature",
    ),
    "vllm.v1.worker.gpu.sample.logprob": ("compute_topk_scores",),
    "vllm.v1.worker.gpu.sample.output": ("SamplerOutput",),
    "vllm.v1.worker.gpu.metrics.logits": ("get_num_nans",),
    # Attention.
    "vllm.v1.attention.backends.flash_attn": (
        "FlashAttentionImpl.forward",
        "FlashAttentionMetadataBuilder.build",
        "FlashAttentionMetadataBuilder._get_scheduler_metadata",
    ),
    "vllm.v1.attention.backends.triton_attn": (
        "TritonAttentionImpl.forward",
        "TritonAttentionMetadataBuilder.build",
    ),
    "vllm.v1.attention.backends.cpu_attn": (
        "CPUAttentionBackendImpl.forward",
        "CPUAttentionBackendImpl.do_kv_cache_update",
    ),
    "vllm.v1.attention.backends.mla.triton_mla": (
        "TritonMLAImpl.forward_mqa",
        "TritonMLAMetadataBuilder",
    ),
    "vllm.v1.attention.backends.mla.flashattn_mla": (
        "FlashAttnMLAImpl.forward_mqa",
        "FlashAttnMLAMetadataBuilder._build_decode",
        "FlashAttnMLAMetadataBuilder._schedule_decode",
    ),
    "vllm.v1.attention.backends.mla.flashmla": ("FlashMLAImpl.forward_mqa",),
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
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase.is_draft_layer",),
    "vllm.model_executor.layers.attention.attention": (
        "Attention",
        "set_default_quant_scales._q_scale",
        "set_default_quant_scales._k_scale",
        "set_default_quant_scales._v_scale",
        "set_default_quant_scales._k_scale_float",
        "set_default_quant_scales._v_scale_float",
    ),
}

# Version -> what only it and later ones have; code that uses it asks whether it is there.
SEAMS_SINCE: dict[tuple[int, int], dict[str, tuple[str, ...]]] = {
    (0, 33): {
        "vllm.v1.engine": ("EngineCoreOutput.error",),
        "vllm.v1.attention.backends.mla.triton_mla": (
            "TritonMLAImpl.reserve_workspace",
            "TritonMLAImpl._vllm_config",
            "_reserve_attn_logits_workspace",
        ),
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator": (
            "DFlashSpeculator._aux_staging",
            "DFlashSpeculator._store_hidden_states",
        ),
    },
}
