# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that are replaced, subclassed or used although they are not public."""

from packaging.specifiers import SpecifierSet

SUPPORTED_VLLM = SpecifierSet(">=0.32.0,<0.34", prereleases=True)

# module -> what must be there: "name", "Class: member member ..." or, for what a function gives its
# first parameter, "function: attribute attribute ...".
SEAMS: dict[str, tuple[str, ...]] = {
    # Configuration.
    "vllm.engine.arg_utils": (
        "EngineArgs: create_speculative_config create_engine_config add_cli_args",
    ),
    "vllm.config.vllm": ("VllmConfig: num_lookahead_tokens use_v2_model_runner",),
    "vllm.config.speculative": ("SpeculativeConfig: max_num_new_slots_for_drafting",),
    "vllm.transformers_utils.repo_utils": ("try_get_local_file",),
    # Engine core and scheduler.
    "vllm.v1.engine.core": ("EngineCore: __init__",),
    "vllm.v1.core.sched.scheduler": (
        "Scheduler: update_from_output make_spec_decoding_stats make_stats finish_requests",
        "Scheduler: schedule dynamic_sd_lookup kv_cache_manager log_stats num_spec_tokens",
        "Scheduler: requests spec_decode_metrics_level",
    ),
    "vllm.v1.core.sched.output": (
        "SchedulerOutput: make_empty num_scheduled_tokens total_num_scheduled_tokens",
        "SchedulerOutput: scheduled_spec_decode_tokens num_invalid_spec_tokens",
        "SchedulerOutput: num_spec_tokens_to_schedule scheduled_new_reqs",
        "NewRequestData: req_id",
    ),
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager: get_block_ids evict_blocks",),
    "vllm.v1.request": (
        "RequestStatus: FINISHED_ERROR",
        "Request: get_finished_reason take_events trace_headers client_index",
        "Request: num_output_tokens is_finished request_id",
    ),
    "vllm.v1.engine": ("EngineCoreOutput", "EngineCoreOutputs: outputs"),
    "vllm.v1.outputs": ("ModelRunnerOutput: req_id_to_index prompt_logprobs_dict",),
    "vllm.outputs": ("RequestError: message",),
    # Requests.
    "vllm.v1.engine.input_processor": ("InputProcessor: process_inputs speculative_config",),
    "vllm.sampling_params": (
        "SamplingParams: bad_words_token_ids all_stop_token_ids allowed_token_ids min_tokens",
    ),
    "vllm.v1.worker.gpu.sample.logit_bias": (
        "MAX_NUM_ALLOWED_TOKEN_IDS",
        "MAX_NUM_STOP_TOKEN_IDS",
    ),
    "vllm.envs": ("VLLM_MAX_BAD_WORDS_TOTAL_TOKENS",),
    # Metrics.
    "vllm.v1.spec_decode.metrics": (
        "SpecDecodingProm: __init__",
        "SpecDecodingLogging: observe log reset accepted_tokens_per_pos_lists num_drafts",
        "SpecDecodingStats: num_accepted_tokens_per_pos",
    ),
    "vllm.v1.metrics.loggers": (
        "StatLoggerManager: __init__ record stat_loggers",
        "LoggingStatLogger: spec_decoding_logging",
        "PrometheusStatLogger: _counter_cls _gauge_cls per_engine_labelvalues",
    ),
    # Worker and model runner.
    "vllm.v1.worker.gpu_worker": ("Worker: sleep wake_up",),
    "vllm.v1.worker.gpu.model_runner": (
        "sort_batch_req_ids",
        "GPUModelRunner: sample execute_model get_draft_model sample_tokens get_model",
        "GPUModelRunner: execute_model_state cudagraph_manager input_buffers model",
        "GPUModelRunner: model_state req_states sampler speculator capture_model",
        "ExecuteModelState: input_batch attn_metadata slot_mappings_by_layer hidden_states",
        "ExecuteModelState: aux_hidden_states",
    ),
    "vllm.v1.worker.gpu.async_utils": (
        "AsyncOutput: get_output model_runner_output sampled_token_ids sampler_output",
    ),
    "vllm.v1.worker.gpu.states": (
        "RequestState: last_sampled_tokens next_prefill_tokens prefill_len",
    ),
    "vllm.v1.worker.gpu.input_batch": (
        "get_num_sampled_and_rejected",
        "InputBuffers: input_ids",
        "InputBatch: cu_num_logits cu_num_logits_np expanded_idx_mapping expanded_local_pos",
        "InputBatch: idx_mapping idx_mapping_np input_ids logits_indices num_reqs",
        "InputBatch: num_reqs_after_padding num_scheduled_tokens num_tokens",
        "InputBatch: num_tokens_after_padding positions query_start_loc req_ids seq_lens",
        "InputBatch: seq_lens_cpu_upper_bound",
    ),
    "vllm.v1.worker.gpu.buffer_utils": ("UvaBackedTensor: np copy_to_uva gpu",),
    "vllm.v1.worker.gpu.cudagraph_utils": (
        "build_dynamic_sd_schedule_lookup",
        "graph_capture",
        "CudaGraphManager: _init_candidates run_fullgraph graphs _capture_descs",
        "CudaGraphManager: _max_full_descs_to_capture",
        "ModelCudaGraphManager: capture",
        "BatchExecutionDescriptor: num_tokens num_reqs uniform_token_count num_active_loras",
    ),
    "vllm.v1.worker.gpu.model_states": ("init_model_state", "resolve_model_state_cls"),
    "vllm.v1.worker.gpu.model_states.interface": (
        "ModelState: prepare_inputs prepare_dummy_inputs prepare_attn postprocess_state",
        "ModelState: custom_sampler add_request apply_staged_writes initialize_kv_cache",
        "ModelState: device vllm_config",
    ),
    "vllm.v1.worker.gpu.model_states.default": ("DefaultModelState: prepare_attn rope_state",),
    # Drafter.
    "vllm.v1.worker.gpu.spec_decode": ("init_speculator",),
    "vllm.v1.worker.gpu.spec_decode.speculator": (
        "DraftModelSpeculator: max_num_reqs max_num_tokens num_speculative_steps device",
        "DraftModelSpeculator: draft_model_config speculative_config vllm_config model",
        "DraftModelSpeculator: input_buffers",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator": (
        "DFlashSpeculator: _generate_draft _run_model _num_graph_context_tokens capture",
        "DFlashSpeculator: init_cudagraph_manager propose num_query_per_req load_draft_model",
        "DFlashSpeculator: query_cudagraph_manager sample_idx_mapping sample_indices",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.cudagraph": ("DFlashCudaGraphManager: capture",),
    "vllm.v1.worker.gpu.spec_decode.utils": ("get_parallel_drafting_token_id",),
    "vllm.model_executor.models.qwen3_dflash": (
        "dflash_has_any_non_causal",
        "DFlashQwen3ForCausalLM: compute_logits draft_id_to_target_id lm_head model",
    ),
    "vllm.model_executor.models.utils": ("process_eagle_weight: has_own_lm_head",),
    "vllm.model_executor.layers.logits_processor": ("LogitsProcessor: forward",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("VocabParallelEmbedding",),
    "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils": ("get_eagle3_aux_layers_from_config",),
    # Sampling.
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler": (
        "gather_draft_sampled",
        "get_max_chunk_logits",
        "_iter_request_chunks",
    ),
    "vllm.v1.worker.gpu.sample.sampler": (
        "Sampler: sample get_logprobs_dims compute_nans logprob_token_ids_state logprobs_mode",
        "Sampler: req_states sampling_states logits_processors",
    ),
    "vllm.v1.worker.gpu.sample.states": ("SamplingStates: seeds temperature",),
    "vllm.v1.worker.gpu.sample.logprob": ("compute_topk_scores",),
    "vllm.v1.worker.gpu.sample.output": ("SamplerOutput",),
    "vllm.v1.worker.gpu.metrics.logits": ("get_num_nans",),
    # Attention.
    "vllm.v1.attention.backends.flash_attn": (
        "FlashAttentionImpl: forward vllm_flash_attn_version sinks kv_cache_dtype",
        "FlashAttentionImpl: num_kv_heads scale head_size alibi_slopes",
        "FlashAttentionMetadataBuilder: build _get_scheduler_metadata",
        "FlashAttentionMetadata: block_table max_num_splits max_query_len max_seq_len",
        "FlashAttentionMetadata: num_actual_tokens query_start_loc scheduler_metadata",
        "FlashAttentionMetadata: slot_mapping",
    ),
    "vllm.v1.attention.backends.triton_attn": (
        "TritonAttentionImpl: forward sinks kv_cache_dtype num_kv_heads scale head_size",
        "TritonAttentionImpl: alibi_slopes",
        "TritonAttentionMetadataBuilder: build",
        "TritonAttentionMetadata: block_table max_query_len max_seq_len num_actual_tokens",
        "TritonAttentionMetadata: query_start_loc slot_mapping",
    ),
    "vllm.v1.attention.backends.flashinfer": (
        "FlashInferImpl: forward sinks kv_cache_dtype num_heads num_kv_heads num_queries_per_kv",
        "FlashInferImpl: scale head_size alibi_slopes",
        "FlashInferMetadataBuilder: build reorder_batch_threshold model_config page_size",
        "FlashInferMetadataBuilder: num_qo_heads num_kv_heads head_dim sm_scale logits_soft_cap",
        "FlashInferMetadata: num_actual_tokens slot_mapping",
    ),
    "vllm.v1.attention.backends.cpu_attn": (
        "CPUAttentionBackendImpl: forward do_kv_cache_update sinks kv_cache_dtype",
        "CPUAttentionBackendImpl: num_kv_heads scale head_size",
        "CPUAttentionMetadata: block_table num_actual_tokens query_start_loc slot_mapping",
        "CPUAttentionMetadata: seq_lens",
    ),
    "vllm.v1.attention.backends.mla.triton_mla": (
        "TritonMLAMetadataBuilder",
        "TritonMLAImpl: forward_mqa",
    ),
    "vllm.v1.attention.backends.mla.flashattn_mla": (
        "FlashAttnMLAImpl: forward_mqa",
        "FlashAttnMLAMetadataBuilder: _build_decode _schedule_decode",
        "FlashAttnMLADecodeMetadata: query_start_loc max_query_len max_seq_len",
        "FlashAttnMLADecodeMetadata: scheduler_metadata max_num_splits",
    ),
    "vllm.v1.attention.backends.mla.flashmla": (
        "FlashMLAImpl: forward_mqa",
        "FlashMLADecodeMetadata: scheduler_metadata",
    ),
    "vllm.v1.attention.ops.flashmla": ("flash_mla_with_kvcache",),
    "vllm.v1.attention.selector": ("get_attn_backend",),
    "vllm.model_executor.layers.attention.mla_attention": (
        "QueryLenSupport",
        "split_decodes_and_prefills",
        "MLACommonMetadataBuilder: build reorder_batch_threshold query_len_support num_heads",
        "MLACommonMetadata: decode num_decodes num_decode_tokens slot_mapping",
        "MLACommonDecodeMetadata: block_table",
        "MLAAttention: sliding_window kv_cache_dtype impl attn_backend",
    ),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase: is_draft_layer",),
    "vllm.model_executor.layers.attention.attention": (
        "set_default_quant_scales: _q_scale _k_scale _v_scale _k_scale_float _v_scale_float",
        "Attention: impl attn_backend attn_type head_size head_size_v kv_cache_dtype",
        "Attention: kv_cache_torch_dtype dtype sliding_window kv_sharing_target_layer_name",
        "Attention: kv_cache",
    ),
}

# Version -> what only it and later ones have; code that uses it asks whether it is there.
SEAMS_SINCE: dict[tuple[int, int], dict[str, tuple[str, ...]]] = {
    (0, 33): {
        "vllm.v1.engine": ("EngineCoreOutput: error",),
        "vllm.v1.attention.backends.mla.triton_mla": (
            "_reserve_attn_logits_workspace",
            "TritonMLAImpl: reserve_workspace _vllm_config",
        ),
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator": (
            "DFlashSpeculator: _aux_staging _store_hidden_states",
        ),
    },
}
