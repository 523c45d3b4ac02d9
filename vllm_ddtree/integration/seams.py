# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that are imported, replaced, subclassed or used although they are not public.

How an entry reads:

- `"name"`: the module has it.
- `"Class: member member"`: the class has these methods, fields or attributes. For a function in the
  place of the class: it gives these attributes to its first parameter.
- `name(a, b)`, also of a member: its first parameters are these, in this order; `self` and `cls`
  are not counted. Those behind a `*` are passed by name, and may stand anywhere: `name(a, *, c)`.
- A parameter that is not listed must have a default, or the call, or the method that overrides it,
  would fail. Behind `...` this is not asked: what the caller gives is passed on as it is.
"""

from packaging.specifiers import SpecifierSet

SUPPORTED_VLLM = SpecifierSet(">=0.32.0,<0.34", prereleases=True)

SEAMS: dict[str, tuple[str, ...]] = {
    # Of the whole package.
    "vllm": ("__version__", "LLM", "SamplingParams"),
    "vllm.logger": ("init_logger(name)", "_VllmLogger: info_once(msg)"),
    "vllm.triton_utils": ("HAS_TRITON", "tl", "triton"),
    "vllm.platforms": ("current_platform",),
    "vllm.platforms.interface": (
        "Platform: fp8_dtype() _align_hybrid_block_size(vllm_config, ...)",
    ),
    "vllm.exceptions": ("VLLMValidationError: __init__(message, *, parameter, value)",),
    "vllm.distributed": (
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
        "get_tp_group",
        "tensor_model_parallel_all_gather",
    ),
    "vllm.distributed.communication_op": ("tensor_model_parallel_all_gather(input_, *, dim)",),
    "vllm.distributed.parallel_state": (
        "get_tensor_model_parallel_rank()",
        "get_tensor_model_parallel_world_size()",
        "get_tp_group()",
        "GroupCoordinator: world_size cpu_group broadcast_object(obj, src)",
    ),
    "vllm.utils.torch_utils": (
        "async_tensor_h2d(data, device)",
        "canonicalize_singleton_dim_strides(t)",
    ),
    "vllm.forward_context": (
        "get_forward_context()",
        "ForwardContext: attn_metadata no_compile_layers",
    ),
    # Configuration.
    "vllm.engine.arg_utils": (
        "EngineArgs: create_speculative_config(*, target_model_config, target_parallel_config)",
        "EngineArgs: create_engine_config(...) add_cli_args(parser) from_cli_args(args)",
        "AsyncEngineArgs",
        "EngineArgs: speculative_config spec_method spec_model spec_tokens",
        "EngineArgs: compilation_config max_num_active_seqs",
        "EngineArgs: enable_lora max_num_seqs max_num_batched_tokens watermark_config",
        "EngineArgs: create_model_config() attention_backend kv_cache_dtype",
    ),
    "vllm.config.vllm": (
        "HAS_TRITON",
        "VllmConfig: num_lookahead_tokens use_v2_model_runner",
        "set_current_vllm_config(vllm_config)",
    ),
    "vllm.config": ("replace",),
    "vllm.config.utils": ("config(cls)", "replace(dataclass_instance, ...)"),
    "vllm.config.compilation": ("CUDAGraphMode: FULL NONE",),
    "vllm.config.model": (
        "PROCESSED_LOGPROBS_MODES",
        "ModelConfig: get_head_size() get_num_attention_heads(parallel_config) get_vocab_size()",
        "ModelConfig: get_total_num_hidden_layers() get_hidden_size()",
        "ModelConfig: get_num_kv_heads(parallel_config)",
        "ModelConfig: get_num_layers_by_block_type(parallel_config, block_type)",
    ),
    "vllm.config.speculative": (
        "SpeculativeConfig: max_num_new_slots_for_drafting",
        "SpeculativeConfig: uses_dynamic_speculative_decoding()",
        "SpeculativeConfig: num_speculative_tokens_per_batch_size",
    ),
    "vllm.transformers_utils.repo_utils": (
        "try_get_local_file(model, file_name, revision)",
        "get_hf_file_to_dict(file_name, model, revision)",
    ),
    # The command line, for `vllm-ddtree`.
    "vllm.usage.usage_lib": ("UsageContext: OPENAI_API_SERVER",),
    "vllm.utils.argparse_utils": ("FlexibleArgumentParser: __init__(...) error(message)",),
    "vllm.model_executor.models": ("ModelRegistry",),
    "vllm.benchmarks.datasets.datasets": (
        "add_dataset_parser(parser)",
        "get_samples(args, tokenizer)",
    ),
    # Engine core and scheduler.
    "vllm.v1.engine.core": (
        "EngineCore: __init__(vllm_config, ...) scheduler model_executor vllm_config",
    ),
    "vllm.v1.executor.uniproc_executor": ("ExecutorWithExternalLauncher",),
    "vllm.v1.executor.abstract": ("Executor: collective_rpc(method, *, non_block)",),
    "vllm.v1.core.sched.scheduler": (
        "Scheduler: schedule(...) update_from_output(scheduler_output, model_runner_output)",
        "Scheduler: make_spec_decoding_stats(*, num_accepted_tokens, request_id, ...)",
        "Scheduler: make_stats(spec_decoding_stats, ...)",
        "Scheduler: finish_requests(request_ids, finished_status) get_request_counts()",
        "Scheduler: dynamic_sd_lookup kv_cache_manager log_stats num_spec_tokens",
        "Scheduler: requests spec_decode_metrics_level running waiting max_num_running_reqs",
    ),
    "vllm.v1.core.sched.output": (
        "SchedulerOutput: make_empty() num_scheduled_tokens total_num_scheduled_tokens",
        "SchedulerOutput: scheduled_spec_decode_tokens num_invalid_spec_tokens",
        "SchedulerOutput: num_spec_tokens_to_schedule scheduled_new_reqs",
        "NewRequestData: req_id",
    ),
    "vllm.v1.core.kv_cache_manager": (
        "KVCacheManager: get_block_ids(request_id) evict_blocks(block_ids)",
    ),
    "vllm.v1.request": (
        "RequestStatus: FINISHED_ERROR",
        "Request: get_finished_reason() take_events() trace_headers client_index",
        "Request: num_output_tokens is_finished() request_id spec_token_ids",
    ),
    "vllm.v1.engine": (
        "EngineCoreOutput: request_id new_token_ids finish_reason stop_reason events trace_headers",
        "EngineCoreOutputs: outputs",
    ),
    "vllm.v1.outputs": (
        "ModelRunnerOutput: req_id_to_index prompt_logprobs_dict",
        "LogprobsTensors: cat(tensors, *, cu_num_generated_tokens)",
    ),
    "vllm.outputs": ("RequestError: code message",),
    # Requests.
    "vllm.v1.engine.input_processor": ("InputProcessor: process_inputs(...) speculative_config",),
    "vllm.sampling_params": (
        "SamplingParams: bad_words_token_ids all_stop_token_ids allowed_token_ids min_tokens",
        "SamplingParams: presence_penalty frequency_penalty repetition_penalty bad_words",
        "SamplingParams: structured_outputs",
    ),
    "vllm.v1.worker.gpu.sample.logit_bias": (
        "LogitBiasState",
        "MAX_NUM_ALLOWED_TOKEN_IDS",
        "MAX_NUM_STOP_TOKEN_IDS",
    ),
    "vllm.envs": (
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS",
        "VLLM_PLUGINS",
        "VLLM_USE_V2_MODEL_RUNNER",
    ),
    # Metrics.
    "vllm.v1.spec_decode.metrics": (
        "SpecDecodingProm: __init__(speculative_config, ...)",
        "SpecDecodingLogging: __init__() observe(spec_decoding_stats) log(log_fn) reset()",
        "SpecDecodingLogging: accepted_tokens_per_pos_lists num_drafts",
        "SpecDecodingStats: new(num_spec_tokens) num_accepted_tokens_per_pos num_spec_tokens",
    ),
    "vllm.v1.metrics.loggers": (
        "StatLoggerManager: __init__(vllm_config, ...) stat_loggers",
        "StatLoggerManager: record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)",
        "LoggingStatLogger: spec_decoding_logging",
        "PrometheusStatLogger: _counter_cls _gauge_cls per_engine_labelvalues",
    ),
    # Worker and model runner.
    "vllm.v1.worker.gpu_worker": ("Worker: sleep(level) wake_up(tags)",),
    "vllm.v1.worker.gpu.model_runner": (
        "sort_batch_req_ids",
        "GPUModelRunner: execute_model(scheduler_output, *, dummy_run, ...) sample_tokens(...)",
        "GPUModelRunner: capture_model(...) get_draft_model() get_model() sample",
        "GPUModelRunner: execute_model_state cudagraph_manager model",
        "GPUModelRunner: model_config uses_inputs_embeds adaptive_verification",
        "GPUModelRunner: model_state req_states sampler speculator lora_config",
        "GPUModelRunner: aux_output_connector",
        "ExecuteModelState: input_batch attn_metadata slot_mappings_by_layer hidden_states",
        "ExecuteModelState: aux_hidden_states",
    ),
    "vllm.distributed.aux_output_connector.worker": (
        "AuxOutputWorkerConnector: prepare_output(...)",
        "PendingAuxOutput: routed_experts_gpu",
    ),
    "vllm.v1.worker.lora_model_runner_mixin": (
        "LoRAModelRunnerMixin: _set_active_loras(prompt_lora_mapping, ...)",
        "LoRAModelRunnerMixin: maybe_setup_dummy_loras(lora_config)",
        "LoRAModelRunnerMixin: maybe_select_dummy_loras(lora_config, num_scheduled_tokens, *, "
        "num_sampled_tokens, num_active_loras)",
    ),
    "vllm.v1.worker.gpu.async_utils": (
        "AsyncOutput: get_output() model_runner_output sampled_token_ids sampler_output",
    ),
    "vllm.v1.worker.gpu.states": (
        "RequestState: last_sampled_tokens next_prefill_tokens prefill_len",
    ),
    "vllm.v1.worker.gpu.input_batch": (
        "get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, "
        "prefill_len)",
        "InputBuffers: input_ids",
        "InputBatch: cu_num_logits cu_num_logits_np expanded_idx_mapping expanded_local_pos",
        "InputBatch: idx_mapping idx_mapping_np input_ids logits_indices num_reqs",
        "InputBatch: num_reqs_after_padding num_scheduled_tokens num_tokens",
        "InputBatch: num_tokens_after_padding positions query_start_loc req_ids seq_lens",
        "InputBatch: is_padding seq_lens_cpu_upper_bound",
    ),
    "vllm.v1.worker.gpu.buffer_utils": (
        "UvaBackedTensor: __init__(size, dtype) np copy_to_uva() gpu",
    ),
    "vllm.v1.worker.gpu.cudagraph_utils": (
        "build_dynamic_sd_schedule_lookup",
        "graph_capture",
        "CudaGraphManager: __init__(vllm_config, device, cudagraph_mode, *, decode_query_len)",
        "CudaGraphManager: _init_candidates() graphs _capture_descs",
        "CudaGraphManager: _max_full_descs_to_capture cudagraph_mode compilation_config",
        "CudaGraphManager: decode_query_len max_num_reqs vllm_config",
        "ModelCudaGraphManager: capture(model, model_state, ...)",
        "BatchExecutionDescriptor: num_tokens num_reqs uniform_token_count num_active_loras",
    ),
    "vllm.v1.worker.gpu.model_states": (
        "init_model_state(vllm_config, model, encoder_cache, device)",
        "resolve_model_state_cls(vllm_config, model)",
    ),
    "vllm.v1.worker.gpu.model_states.interface": (
        "ModelState: __init__(vllm_config, model, encoder_cache, device)",
        "ModelState: add_request(req_index, new_req_data) apply_staged_writes()",
        "ModelState: initialize_kv_cache(kv_cache_config, block_tables) custom_sampler(sampler)",
        "ModelState: prepare_inputs(input_batch, req_states)",
        "ModelState: prepare_dummy_inputs(num_reqs, num_tokens)",
        "ModelState: prepare_attn(input_batch, cudagraph_mode, block_tables, slot_mappings, "
        "attn_groups, kv_cache_config, for_capture, ...)",
        "ModelState: preprocess_state(input_batch, ...)",
        "ModelState: postprocess_state(idx_mapping, num_sampled, num_computed_tokens)",
        "ModelState: dummy_inputs_embeds(num_tokens) device vllm_config",
    ),
    "vllm.v1.worker.gpu.model_states.default": (
        "DefaultModelState: __init__(vllm_config, model, encoder_cache, device)",
        "DefaultModelState: add_request(req_index, new_req_data) apply_staged_writes()",
        "DefaultModelState: prepare_inputs(input_batch, req_states)",
        "DefaultModelState: prepare_dummy_inputs(num_reqs, num_tokens)",
        "DefaultModelState: prepare_attn(input_batch, cudagraph_mode, block_tables, slot_mappings, "
        "attn_groups, kv_cache_config, for_capture, ...)",
        "DefaultModelState: rope_state",
    ),
    "vllm.v1.worker.gpu.mm.rope": ("RopeState: positions prefill_delta",),
    "vllm.v1.worker.gpu.model_states.mamba_hybrid": (
        "MambaHybridModelState: __init__(vllm_config, model, encoder_cache, device)",
        "MambaHybridModelState: initialize_kv_cache(kv_cache_config, block_tables)",
        "MambaHybridModelState: prepare_attn(input_batch, cudagraph_mode, block_tables, "
        "slot_mappings, attn_groups, kv_cache_config, for_capture, ...)",
        "MambaHybridModelState: postprocess_state(idx_mapping, num_sampled, num_computed_tokens)",
    ),
    "vllm.v1.worker.gpu.block_table": ("BlockTables: input_block_tables",),
    "vllm.v1.worker.mamba_utils": ("get_mamba_groups(kv_cache_config)",),
    # Recurrent layers.
    "vllm.model_executor.layers.mamba.abstract": (
        "MambaBase: get_kv_cache_spec(vllm_config) get_attn_backend() get_state_shape()",
        "MambaBase: get_state_dtype() kv_cache",
    ),
    "vllm.model_executor.layers.mamba.mamba_utils": ("is_conv_state_dim_first()",),
    "vllm.model_executor.layers.mamba.gdn.base": (
        "GatedDeltaNetAttention: num_spec activation model_config tp_size",
    ),
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn": (
        "QwenGatedDeltaNetAttention: _forward_core(mixed_qkv, b, a, core_attn_out)",
        "QwenGatedDeltaNetAttention: get_state_shape() conv1d A_log dt_bias num_k_heads",
        "QwenGatedDeltaNetAttention: head_k_dim head_v_dim enable_fused_gdn_spec_decode",
        "QwenGatedDeltaNetAttention: gdn_decode_kernel",
    ),
    "vllm.model_executor.layers.mamba.mamba_mixer2": (
        "MambaMixer2: conv_ssm_forward(projected_states, output) get_state_shape() num_spec",
        "MambaMixer2: conv_weights conv1d A D dt_bias n_groups tp_size activation use_replayssm",
        "MambaMixer2: tped_intermediate_size tped_conv_size tped_dt_size mamba_config",
    ),
    "vllm.config.mamba": ("MambaConfig: enable_stochastic_rounding",),
    "vllm.v1.kv_cache_interface": (
        "KVCacheSpec: block_size",
        "MambaSpec: num_speculative_blocks mamba_cache_mode",
    ),
    "vllm.v1.attention.backends.gdn_attn": (
        "GDNAttentionBackend: get_builder_cls()",
        "GDNAttentionMetadata: num_prefills num_prefill_tokens num_decodes num_decode_tokens",
        "GDNAttentionMetadata: num_spec_decodes num_spec_decode_tokens num_actual_tokens",
        "GDNAttentionMetadataBuilder: build(common_prefix_len, common_attn_metadata, "
        "num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build)",
        "GDNAttentionMetadataBuilder: build_for_cudagraph_capture(common_attn_metadata)",
        "GDNAttentionMetadataBuilder: mamba_aligned_state_indices",
    ),
    "vllm.v1.attention.backends.mamba2_attn": (
        "Mamba2AttentionBackend: get_builder_cls()",
        "Mamba2AttentionMetadataBuilder: checkpoint_builder",
    ),
    "vllm.model_executor.layers.mamba.checkpoint": ("MambaPrefillCheckpointBuilder: vllm_config",),
    "vllm.v1.attention.backends.mamba_attn": (
        "BaseMambaAttentionMetadataBuilder: __init__(kv_cache_spec, layer_names, vllm_config, "
        "device)",
        "BaseMambaAttentionMetadataBuilder: build(common_prefix_len, common_attn_metadata, "
        "fast_build, ...) build_for_cudagraph_capture(common_attn_metadata)",
        "BaseMambaAttentionMetadataBuilder: supports_update_block_table",
    ),
    # Drafter.
    "vllm.v1.worker.gpu.spec_decode": ("init_speculator(vllm_config, device, req_states)",),
    "vllm.v1.worker.gpu.spec_decode.speculator": (
        "DraftModelSpeculator: max_num_reqs max_num_tokens num_speculative_steps device",
        "DraftModelSpeculator: draft_model_config speculative_config vllm_config model",
        "DraftModelSpeculator: input_buffers dp_size",
        "DraftModelSpeculator: _build_uniform_attn_metadata(...)",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator": (
        "DFlashSpeculator: __init__(vllm_config, device) init_cudagraph_manager(cudagraph_mode)",
        "DFlashSpeculator: capture() _num_graph_context_tokens(num_reqs)",
        "DFlashSpeculator: _generate_draft(num_reqs, num_tokens_padded, attn_metadata, "
        "slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode)",
        "DFlashSpeculator: _run_model(num_tokens, attn_metadata, slot_mappings, "
        "num_tokens_across_dp, cudagraph_runtime_mode)",
        "DFlashSpeculator: propose(input_batch, attn_metadata, slot_mappings, "
        "last_hidden_states, aux_hidden_states, num_sampled, num_rejected, *, last_sampled, "
        "next_prefill_tokens, temperature, seeds, dummy_run, skip_attn_for_dummy_run, "
        "num_speculative_tokens, ...)",
        "DFlashSpeculator: _speculator_name num_query_per_req query_cudagraph_manager",
        "DFlashSpeculator: sample_idx_mapping sample_indices",
        "DFlashSpeculator: load_draft_model(target_model, target_attn_layer_names)",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash2.speculator": (
        "DFlash2Speculator: _score_candidates(candidate_ids, unary_logits, hidden_states)",
        "DFlash2Speculator: __init__(vllm_config, device) _candidate_top_k_key",
    ),
    "vllm.v1.worker.gpu.spec_decode.lilicorr.speculator": (
        "LiLiCorrSpeculator: _score_candidates(candidate_ids, unary_logits, hidden_states)",
        "LiLiCorrSpeculator: __init__(vllm_config, device) prepare_context_anchor(...)",
    ),
    "vllm.v1.worker.gpu.spec_decode.dspark.speculator": (
        "DSparkSpeculator: __init__(vllm_config, device) _anchor_idx sample_from_anchor",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.cudagraph": ("DFlashCudaGraphManager: capture",),
    "vllm.v1.worker.gpu.spec_decode.utils": ("get_parallel_drafting_token_id(hf_config)",),
    "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils": (
        "get_eagle3_aux_layers_from_config(spec_config)",
    ),
    "vllm.model_executor.model_loader.utils": ("get_model_cls(model_config)",),
    "vllm.model_executor.models.interfaces": ("supports_eagle3(model)",),
    "vllm.model_executor.models.qwen3_dflash": (
        "DFlashQwen3ForCausalLM: compute_logits(hidden_states) lm_head logits_processor",
        "DFlashQwen3ForCausalLM: draft_id_to_target_id model",
        "dflash_has_any_non_causal(config)",
    ),
    "vllm.model_executor.models.qwen3_dflash2": (
        "DFlash2Qwen3ForCausalLM: compute_candidates(hidden_states) candidate_logits_processor",
    ),
    "vllm.model_executor.models.registry": ("ModelRegistry",),
    "vllm.model_executor.models.utils": ("process_eagle_weight: has_own_lm_head",),
    "vllm.model_executor.layers.logits_processor": (
        "LogitsProcessor: forward(lm_head, hidden_states, *, skip_gather) org_vocab_size",
        "LogitsProcessor: _get_logits(hidden_states, lm_head, embedding_bias, skip_gather)",
        "LogitsProcessor: scale soft_cap",
    ),
    "vllm.model_executor.layers.vocab_parallel_embedding": (
        "VocabParallelEmbedding: tp_size tp_rank num_embeddings_per_partition",
    ),
    # Sampling.
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler": (
        "RejectionSampler: __init__(sampler, spec_config, device)",
        "RejectionSampler: __call__(logits, input_batch, draft_logits, invalid_drafts) sampler",
        "gather_draft_sampled(input_ids, positions, logits_indices, expanded_idx_mapping, "
        "expanded_local_pos, prefill_len)",
        "get_max_chunk_logits(vocab_size)",
        "_iter_request_chunks(cu_num_logits, max_chunk_logits)",
    ),
    "vllm.v1.worker.gpu.spec_decode.adaptive_verification": (
        "AdaptiveVerificationManager: add_request(req_idx)",
        "AdaptiveVerificationManager: get_num_tokens(num_tokens_per_req, draft_tokens)",
        "AdaptiveVerificationManager: compact_batch(num_draft_tokens_per_req, "
        "num_scheduled_tokens, cu_num_logits_np)",
        "AdaptiveVerificationManager: reallocate_drafts(req_ids, idx_mapping)",
    ),
    "vllm.v1.worker.gpu.sample.sampler": (
        "Sampler: sample(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, "
        "input_ids, expanded_local_pos, seq_lens_upper_bound_np, *, return_logprobs)",
        "Sampler: get_logprobs_dims(idx_mapping_np) compute_nans logprob_token_ids_state",
        "Sampler: logprobs_mode req_states sampling_states logits_processors",
        "Sampler: return_sampling_mask",
    ),
    "vllm.v1.worker.gpu.sample.states": ("SamplingStates: seeds temperature top_k",),
    "vllm.v1.worker.gpu.sample.logprob": (
        "compute_topk_scores(logits, num_logprobs, sampled_token_ids, cu_num_logits, *, "
        "logprob_token_ids_state, expanded_idx_mapping, max_per_req_token_ids, logits_mode)",
    ),
    "vllm.v1.worker.gpu.sample.output": (
        "SamplerOutput: sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected",
        "SamplerOutput: sampling_mask_tensors",
        "SamplingMaskTensors: from_logits(logits, cu_num_logits, num_sampled_tokens, max_num_kept, "
        "rows_per_request) cat(chunks)",
    ),
    "vllm.v1.worker.gpu.sample.bad_words": ("BadWordsState",),
    "vllm.v1.worker.gpu.sample.penalties": ("PenaltiesState",),
    "vllm.v1.worker.gpu.metrics.logits": ("get_num_nans(logits)",),
    # Attention.
    "vllm.v1.attention.backend": (
        "AttentionBackend: get_name() get_impl_cls() get_builder_cls()",
        "AttentionCGSupport: UNIFORM_BATCH",
        "AttentionType: DECODER",
        "AttentionMetadataBuilder: build(common_prefix_len, common_attn_metadata, fast_build)",
        "AttentionMetadataBuilder: build_for_cudagraph_capture(common_attn_metadata)",
        "AttentionMetadataBuilder: get_cudagraph_support(vllm_config, kv_cache_spec)",
        "CommonAttentionMetadata: num_reqs max_query_len query_start_loc query_start_loc_cpu",
        "CommonAttentionMetadata: num_actual_tokens seq_lens causal slot_mapping",
        "CommonAttentionMetadata: block_table_tensor is_prefilling seq_lens_cpu_upper_bound",
        "CommonAttentionMetadata: positions rswa_prefix_lens req_idx replace()",
        "CommonAttentionMetadata: _num_computed_tokens_cache _token_to_req_indices_cache",
    ),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum",),
    "vllm.v1.attention.backends.fa_utils": ("flash_attn_varlen_func", "get_flash_attn_version()"),
    "vllm.vllm_flash_attn.flash_attn_interface": (
        "flash_attn_varlen_func(*, q, k, v, q_v, out, cu_seqlens_q, max_seqlen_q, seqused_k, "
        "max_seqlen_k, softmax_scale, causal, softcap, block_table, return_softmax_lse, "
        "scheduler_metadata, fa_version, num_splits, q_descale, k_descale, v_descale)",
    ),
    "vllm.v1.attention.backends.flash_attn": (
        "FlashAttentionImpl: forward(layer, query, key, value, kv_cache, attn_metadata, output, "
        "output_scale, output_block_scale)",
        "FlashAttentionImpl: vllm_flash_attn_version sinks kv_cache_dtype",
        "FlashAttentionImpl: num_kv_heads scale head_size alibi_slopes",
        "FlashAttentionMetadataBuilder: build(common_prefix_len, common_attn_metadata, fast_build)",
        "FlashAttentionMetadataBuilder: get_cudagraph_support(vllm_config, kv_cache_spec)",
        "FlashAttentionMetadataBuilder: _get_scheduler_metadata",
        "FlashAttentionMetadata: block_table max_num_splits max_query_len max_seq_len",
        "FlashAttentionMetadata: num_actual_tokens query_start_loc scheduler_metadata",
        "FlashAttentionMetadata: slot_mapping",
    ),
    "vllm.v1.attention.backends.triton_attn": (
        "TritonAttentionImpl: forward(layer, query, key, value, kv_cache, attn_metadata, output, "
        "output_scale, output_block_scale)",
        "TritonAttentionImpl: sinks kv_cache_dtype num_kv_heads scale head_size alibi_slopes",
        "TritonAttentionMetadataBuilder: build(common_prefix_len, common_attn_metadata, "
        "fast_build)",
        "TritonAttentionMetadata: block_table max_query_len max_seq_len num_actual_tokens",
        "TritonAttentionMetadata: query_start_loc slot_mapping",
    ),
    "vllm.v1.attention.backends.flashinfer": (
        "FlashInferImpl: forward(layer, query, key, value, kv_cache, attn_metadata, output, "
        "output_scale, output_block_scale)",
        "FlashInferImpl: sinks kv_cache_dtype num_heads num_kv_heads num_queries_per_kv",
        "FlashInferImpl: scale head_size alibi_slopes",
        "FlashInferMetadataBuilder: __init__(kv_cache_spec, layer_names, vllm_config, device)",
        "FlashInferMetadataBuilder: build(common_prefix_len, common_attn_metadata, fast_build)",
        "FlashInferMetadataBuilder: get_cudagraph_support(vllm_config, kv_cache_spec)",
        "FlashInferMetadataBuilder: reorder_batch_threshold model_config page_size",
        "FlashInferMetadataBuilder: num_qo_heads num_kv_heads head_dim sm_scale logits_soft_cap",
        "FlashInferMetadata: num_actual_tokens slot_mapping",
    ),
    "vllm.v1.attention.backends.cpu_attn": (
        "CPUAttentionBackendImpl: forward(layer, query, key, value, kv_cache, attn_metadata, "
        "output, output_scale, output_block_scale)",
        "CPUAttentionBackendImpl: do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)",
        "CPUAttentionBackendImpl: sinks kv_cache_dtype num_kv_heads scale head_size",
        "CPUAttentionMetadataBuilder: build(common_prefix_len, common_attn_metadata, fast_build)",
        "CPUAttentionMetadata: block_table num_actual_tokens query_start_loc slot_mapping",
        "CPUAttentionMetadata: seq_lens",
    ),
    "vllm.v1.attention.backends.mla.triton_mla": (
        "TritonMLAMetadataBuilder: __init__(kv_cache_spec, layer_names, vllm_config, device)",
        "TritonMLAImpl: forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)",
    ),
    "vllm.v1.attention.backends.mla.flashattn_mla": (
        "FlashAttnMLAImpl: forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)",
        "FlashAttnMLAMetadataBuilder: __init__(kv_cache_spec, layer_names, vllm_config, device)",
        "FlashAttnMLAMetadataBuilder: _build_decode(...)",
        "FlashAttnMLAMetadataBuilder: _schedule_decode(*, num_reqs, max_query_len, seqlens, "
        "causal, max_num_splits, ...)",
        "FlashAttnMLADecodeMetadata: query_start_loc max_query_len max_seq_len",
        "FlashAttnMLADecodeMetadata: scheduler_metadata max_num_splits",
    ),
    "vllm.v1.attention.backends.mla.flashmla": (
        "FlashMLAImpl: forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)",
        "FlashMLAMetadataBuilder: __init__(kv_cache_spec, layer_names, vllm_config, device)",
        "FlashMLADecodeMetadata: scheduler_metadata",
    ),
    "vllm.v1.attention.ops.flashmla": ("flash_mla_with_kvcache",),
    "vllm.v1.attention.selector": (
        "get_attn_backend(head_size, dtype, kv_cache_dtype, *, use_mla, num_heads)",
    ),
    "vllm.model_executor.layers.attention.mla_attention": (
        "QueryLenSupport: SINGLE_ONLY VARLEN",
        "split_decodes_and_prefills",
        "MLACommonMetadataBuilder: build(common_prefix_len, common_attn_metadata, fast_build)",
        "MLACommonMetadataBuilder: build_for_cudagraph_capture(common_attn_metadata)",
        "MLACommonMetadataBuilder: reorder_batch_threshold query_len_support num_heads",
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

# What only vLLM's builds for CUDA have: it is looked for where the module is.
SEAMS_OF_CUDA: dict[str, tuple[str, ...]] = {
    "vllm.third_party.flashmla.flash_mla_interface": (
        "flash_mla_with_kvcache(*, q, k_cache, block_table, cache_seqlens, head_dim_v, "
        "tile_scheduler_metadata, softmax_scale, causal, is_fp8_kvcache)",
    ),
}

# Version -> what only it and later ones have; code that uses it asks whether it is there.
SEAMS_SINCE: dict[tuple[int, int], dict[str, tuple[str, ...]]] = {
    (0, 33): {
        "vllm.v1.engine": ("EngineCoreOutput: error",),
        "vllm.v1.attention.backends.mla.triton_mla": (
            "_reserve_attn_logits_workspace(vllm_config, max_decode_rows, q_num_heads, "
            "kv_lora_rank)",
            "TritonMLAImpl: reserve_workspace() _vllm_config",
        ),
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator": (
            "DFlashSpeculator: _aux_staging",
            "DFlashSpeculator: _store_hidden_states(num_tokens, last_hidden_states, "
            "aux_hidden_states, num_graph_tokens)",
            "DFlashSpeculator: _prepare_graph_replay(input_batch, ...)",
        ),
    },
}
