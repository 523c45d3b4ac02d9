# SPDX-License-Identifier: Apache-2.0
"""The one module that knows vLLM's private names.

Everything of vLLM that is replaced, or used although it is not a public interface, is listed here
in `SEAMS` and looked up from here; moving to the next vLLM release means editing this file.

- `check()` proves, without importing the heavy modules, that every seam is there (at `register()`).
- `hook_engine_args()` replaces the entry points through which a configuration is made (light).
- `hook_runner()` replaces the two factories of Model Runner V2, `hook_outputs()` and
  `hook_metrics()` the places that statistics pass. They run only in a process in which a DDTree
  configuration exists, so that an installed plugin changes nothing for other methods.

Every replacement calls the original for a configuration that is not DDTree's.
"""

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

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
    "vllm.model_executor.models.qwen3_dflash": ("DFlashQwen3ForCausalLM.compute_logits",),
    "vllm.model_executor.layers.logits_processor": ("LogitsProcessor.forward",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("VocabParallelEmbedding",),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase.is_draft_layer",),
    "vllm.model_executor.layers.attention.attention": ("Attention",),
}

_MARK = "_vllm_ddtree_original"


class SeamError(RuntimeError):
    """vLLM is not one this plugin knows. The message is one line with the fix."""


def vllm_version() -> Version:
    """Version of the vLLM in this process.

    Raises:
        SeamError: it is no version (a source tree that was never built says "dev").

    """
    import vllm

    try:
        return Version(vllm.__version__)
    except InvalidVersion as error:
        raise SeamError(
            f"vllm-ddtree supports vllm {SUPPORTED_VLLM}, but this one calls itself "
            f"{vllm.__version__!r}: install a released vllm of that range"
        ) from error


def _members(source: Path) -> set[str]:
    """Names bound at the top of a module (imported ones too), and "Class.member" of its classes."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef) and not prefix:
                    visit(node.body, node.name + ".")
            elif isinstance(node, ast.Assign):
                names.update(prefix + t.id for t in node.targets if isinstance(t, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(prefix + node.target.id)
            elif isinstance(node, ast.ImportFrom):
                names.update(prefix + (alias.asname or alias.name) for alias in node.names)
            elif isinstance(node, ast.If):
                visit(node.body, prefix)
                visit(node.orelse, prefix)

    visit(ast.parse(source.read_text()).body, "")
    return names


def _source_of(module: str) -> Path | None:
    """The file of a vLLM module, found beside vLLM's own package without importing it."""
    import vllm

    base = Path(vllm.__path__[0]).joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@functools.cache
def check() -> None:
    """Raise `SeamError` unless this vLLM's version is supported and has every seam."""
    version = vllm_version()
    if version not in SUPPORTED_VLLM:
        raise SeamError(
            f"vllm-ddtree supports vllm {SUPPORTED_VLLM}, but vllm {version} is installed: "
            "install a vllm of that range or a newer vllm-ddtree"
        )
    missing = []
    for module, names in SEAMS.items():
        source = _source_of(module)
        if source is None:
            missing.append(module)
            continue
        try:
            present = _members(source)
        except (OSError, SyntaxError):
            present = set()
        missing += [f"{module}.{name}" for name in names if name not in present]
    if missing:
        raise SeamError(
            f"vllm {version} lacks {', '.join(missing)}, which vllm-ddtree builds on: "
            f"install an unmodified vllm {SUPPORTED_VLLM}"
        )


def aux_layers(speculative_config: Any) -> tuple[int, ...] | None:
    """Target layers whose inputs the drafter reads, as vLLM numbers them (DFlash's ids + 1)."""
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

    return eagle3_utils.get_eagle3_aux_layers_from_config(speculative_config)


def mask_token_id(hf_config: Any) -> int | None:
    """The token id of a draft block's masked queries, None when the checkpoint has none."""
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    try:
        return get_parallel_drafting_token_id(hf_config)
    except ValueError:
        return None


def request_chunks(cu_num_logits: Any, max_logits: int) -> list[tuple[int, int]]:
    """Ranges of requests with at most `max_logits` rows each, no request split.

    Args:
        cu_num_logits: NumPy int32 [num_reqs + 1].
        max_logits: rows.

    """
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import _iter_request_chunks

    return list(_iter_request_chunks(cu_num_logits, max_logits))


def reserve_mla_workspace(
    vllm_config: Any, max_rows: int, num_heads: int, kv_lora_rank: int
) -> None:
    """Reserve the scratch of vLLM's Triton MLA decode kernel for so many rows (vLLM 0.33)."""
    from vllm.v1.attention.backends.mla import triton_mla

    triton_mla._reserve_attn_logits_workspace(vllm_config, max_rows, num_heads, kv_lora_rank)


def mla_backend(vllm_config: Any, asked: str | None) -> str | None:
    """The attention backend that vLLM gives a target with multi-head latent attention.

    Args:
        vllm_config: the engine's; its own backend is not read.
        asked: a backend's name, None: vLLM's own choice.

    Returns:
        Its name (a platform may give another than was asked for), None if there is none.

    """
    from vllm.config.vllm import set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import get_attn_backend

    model, attention = vllm_config.model_config, vllm_config.attention_config
    before = attention.backend
    attention.backend = AttentionBackendEnum[asked] if asked else None
    try:
        with set_current_vllm_config(vllm_config):
            # As vLLM's MLAAttention asks (model_executor/layers/attention/mla_attention.py).
            backend: Any = get_attn_backend(
                model.get_head_size(),
                model.dtype,
                vllm_config.cache_config.cache_dtype,
                use_mla=True,
                num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
            )
    except ValueError:
        return None
    finally:
        attention.backend = before
    return backend.get_name()


def plans_ahead(builder: type) -> bool:
    """Whether a metadata builder plans its kernel's work (FlashAttention's scheduler metadata)."""
    return hasattr(builder, "_get_scheduler_metadata")


def new_spec_decoding_stats(num_spec_tokens: int) -> Any:
    """vLLM's SpecDecodingStats of a step without any draft."""
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    return SpecDecodingStats.new(num_spec_tokens)


def model_runner_output(output: Any) -> Any:
    """The `ModelRunnerOutput` of a step's output, which may still be on its way to the host."""
    return getattr(output, "model_runner_output", output)


def stop_with_error(scheduler: Any, req_ids: Collection[str]) -> list[Any]:
    """Finish requests with an error; their blocks are freed and forgotten by the prefix cache.

    Returns:
        The requests that were not finished yet.

    """
    from vllm.v1.request import RequestStatus

    if not req_ids:
        return []
    manager = scheduler.kv_cache_manager
    there = [req_id for req_id in req_ids if req_id in scheduler.requests]
    blocks = {block for req_id in there for ids in manager.get_block_ids(req_id) for block in ids}
    stopped: list[Any] = scheduler.finish_requests(there, RequestStatus.FINISHED_ERROR)
    manager.evict_blocks(blocks)
    return stopped


def add_error_output(outputs: dict[int, Any], request: Any, message: str) -> None:
    """Tell a stopped request's client, whose outputs are `outputs[request.client_index]`."""
    from vllm.outputs import RequestError
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    output = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=message,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
    if hasattr(output, "error"):  # vLLM 0.33
        output.error = RequestError(code="ddtree_invariant", message=message)
    client = outputs.setdefault(request.client_index, EngineCoreOutputs())
    client.outputs = [*client.outputs, output]


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)`, once however often it is called."""
    original = owner.__dict__[name]
    target: Any = original
    wrap: Callable[[Any], Any] = lambda function: function  # noqa: E731
    if isinstance(original, property):
        target, wrap = original.fget, property
    elif isinstance(original, staticmethod):
        target, wrap = original.__func__, staticmethod
    if hasattr(target, _MARK):
        return
    replacement = make(target)
    functools.update_wrapper(replacement, target)
    setattr(replacement, _MARK, target)
    setattr(owner, name, wrap(replacement))


def _method(engine_args: Any) -> str | None:
    """The speculative method that EngineArgs ask for."""
    keys = engine_args.speculative_config
    return engine_args.spec_method or (keys.get("method") if isinstance(keys, dict) else None)


def hook_engine_args(
    make_config: Callable[[dict[str, Any], Any, Any], Any],
    is_ddtree: Callable[[Any], bool],
    begin: Callable[[Any], None],
    finish: Callable[[Any, Any], None],
) -> None:
    """Let `method: ddtree` through where configurations are made.

    Args:
        make_config: (user's keys, target ModelConfig, target ParallelConfig) -> speculative config.
        is_ddtree: whether a speculative config is DDTree's.
        begin: (EngineArgs) -> None; checks what vLLM would answer with advice that misleads.
        finish: (EngineArgs, VllmConfig) -> None; checks the whole configuration, raising
        ValueError.

    """
    from vllm.config.vllm import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    def create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
        def create(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
            if _method(self) != "ddtree":
                return original(
                    self,
                    target_model_config=target_model_config,
                    target_parallel_config=target_parallel_config,
                )
            if not isinstance(self.speculative_config, (dict, type(None))):
                raise ValueError(
                    f"--speculative-config={self.speculative_config!r} is not valid for method "
                    "ddtree: give a JSON object"
                )
            keys = dict(self.speculative_config or {})
            for flag, key, value in (
                ("--spec-method", "method", self.spec_method),
                ("--spec-model", "model", self.spec_model),
                ("--spec-tokens", "num_speculative_tokens", self.spec_tokens),
            ):
                if value is None:
                    continue
                if key in keys:
                    raise ValueError(
                        f"{flag} and --speculative-config['{key}'] are mutually exclusive"
                    )
                keys[key] = value
            return make_config(keys, target_model_config, target_parallel_config)

        return create

    def create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
        def create(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _method(self) == "ddtree":
                begin(self)
            vllm_config = original(self, *args, **kwargs)
            if is_ddtree(vllm_config.speculative_config):
                finish(self, vllm_config)
            return vllm_config

        return create

    def add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
        def add(parser: Any) -> Any:
            parser = original(parser)
            for action in parser._actions:
                if "--spec-method" in action.option_strings and action.choices:
                    action.choices = [*action.choices, "ddtree"]
            return parser

        return add

    def num_lookahead_tokens(original: Callable[[Any], int]) -> Callable[[Any], int]:
        def lookahead(self: Any) -> int:
            if is_ddtree(self.speculative_config):
                # vLLM reserves num_speculative_tokens + 1 = budget + 1; the draft block may be
                # longer.
                return max(original(self), self.speculative_config.block_size)
            return original(self)

        return lookahead

    _replace(EngineArgs, "create_speculative_config", create_speculative_config)
    _replace(EngineArgs, "create_engine_config", create_engine_config)
    _replace(EngineArgs, "add_cli_args", add_cli_args)
    _replace(VllmConfig, "num_lookahead_tokens", num_lookahead_tokens)


def _replace_in_module(defining: str, users: tuple[str, ...], name: str, make: Any) -> None:
    """Replace a function in its module and where it was imported by name."""
    module = importlib.import_module(defining)
    original = getattr(module, name)
    if not hasattr(original, _MARK):
        replacement = functools.wraps(original)(make(original))
        setattr(replacement, _MARK, original)
        setattr(module, name, replacement)
    replacement = getattr(module, name)
    for user in users:
        loaded = sys.modules.get(user)
        if loaded is not None and hasattr(loaded, name):
            setattr(loaded, name, replacement)


def hook_runner(
    is_ddtree: Callable[[Any], bool],
    make_speculator: Callable[..., Any],
    make_model_state: Callable[..., Any],
    core_ready: Callable[[Any], None],
    auto_tiers: Callable[[Any], list[int] | None],
    captured: Callable[[Any, Any, Callable[[], None]], None],
    before_step: Callable[[Any, Any], None],
) -> None:
    """Let Model Runner V2 build DDTree's speculator and model state.

    Args:
        is_ddtree: whether a speculative config is DDTree's.
        make_speculator: (VllmConfig, device) -> speculator.
        make_model_state: (VllmConfig, model, encoder cache, device) -> model state.
        core_ready: called with an EngineCore that is about to serve.
        auto_tiers: for the schedule of `"budget": "auto"` every budget that it may choose, after a
            leading 0; None for other schedules.
        captured: (graph manager of the target, model state, what captures again) -> None, called
            after the target's graphs are captured.
        before_step: (model state, SchedulerOutput) -> None.

    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def engine_core_init(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            if is_ddtree(vllm_config.speculative_config):
                core_ready(self)

        return init

    def tiers(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def lookup(schedule: Any, *args: Any, **kwargs: Any) -> list[int]:
            return auto_tiers(schedule) or original(schedule, *args, **kwargs)

        return lookup

    def capture_forms(original: Callable[..., None]) -> Callable[..., None]:
        def capture(self: Any, model: Any, model_state: Any, *args: Any, **kwargs: Any) -> None:
            def again() -> None:
                original(self, model, model_state, *args, **kwargs)

            again()
            if is_ddtree(self.vllm_config.speculative_config):
                captured(self, model_state, again)

        return capture

    def execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if is_ddtree(self.vllm_config.speculative_config):
                before_step(self.model_state, scheduler_output)
            return original(self, scheduler_output, *args, **kwargs)

        return execute

    _replace(EngineCore, "__init__", engine_core_init)
    _replace(ModelCudaGraphManager, "capture", capture_forms)
    _replace(GPUModelRunner, "execute_model", execute_model)
    # Only the graph manager's use: which decode lengths get graphs.
    _replace_in_module(
        "vllm.v1.worker.gpu.cudagraph_utils", (), "build_dynamic_sd_schedule_lookup", tiers
    )
    runner = "vllm.v1.worker.gpu.model_runner"

    def init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(vllm_config: Any, device: Any, req_states: Any) -> Any:
            if is_ddtree(vllm_config.speculative_config):
                return make_speculator(vllm_config, device)
            return original(vllm_config, device, req_states)

        return init

    def init_model_state(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> Any:
            if is_ddtree(vllm_config.speculative_config):
                return make_model_state(vllm_config, model, encoder_cache, device)
            return original(vllm_config, model, encoder_cache, device)

        return init

    _replace_in_module(
        "vllm.v1.worker.gpu.spec_decode", (runner,), "init_speculator", init_speculator
    )
    _replace_in_module(
        "vllm.v1.worker.gpu.model_states", (runner,), "init_model_state", init_model_state
    )


def hook_sleep(
    is_ddtree: Callable[[Any], bool],
    before: Callable[[Any, int], None],
    after: Callable[[Any, list[str] | None], None],
) -> None:
    """Let DDTree save before a worker sleeps and restore after it has woken up.

    Args:
        is_ddtree: whether a speculative config is DDTree's.
        before: (worker, level).
        after: (worker, tags of what is back; None: all).

    """
    from vllm.v1.worker.gpu_worker import Worker

    def sleep(original: Callable[..., None]) -> Callable[..., None]:
        def go(self: Any, level: int = 1) -> None:
            if is_ddtree(self.vllm_config.speculative_config):
                before(self, level)
            original(self, level)

        return go

    def wake_up(original: Callable[..., None]) -> Callable[..., None]:
        def come(self: Any, tags: list[str] | None = None) -> None:
            original(self, tags)
            if is_ddtree(self.vllm_config.speculative_config):
                after(self, tags)

        return come

    _replace(Worker, "sleep", sleep)
    _replace(Worker, "wake_up", wake_up)


def hook_outputs(with_facts: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Let what is known of a step leave the runner with its output.

    Args:
        with_facts: (vLLM's AsyncOutput.get_output, AsyncOutput) -> ModelRunnerOutput.

    """
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    def get_output(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def get(self: Any) -> Any:
            return with_facts(original, self)

        return get

    _replace(AsyncOutput, "get_output", get_output)


def hook_metrics(
    is_ddtree: Callable[[Any], bool],
    make_metrics: Callable[[list[Any], Any], Any],
    max_depth: Callable[[Any], int],
) -> None:
    """Let a front-end's loggers see what is counted of the trees.

    Args:
        is_ddtree: whether a speculative config is DDTree's.
        make_metrics: (stat loggers, DDTreeConfig) -> an object whose `record(SchedulerStats, engine
            index)` is called before the loggers see the statistics.
        max_depth: DDTreeConfig -> the deepest node of a tree.

    """
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    def manager_init(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            spec = vllm_config.speculative_config
            if is_ddtree(spec):
                self.ddtree_metrics = make_metrics(self.stat_loggers, spec)

        return init

    def manager_record(original: Callable[..., None]) -> Callable[..., None]:
        def record(
            self: Any,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int | None = None,
        ) -> None:
            if (metrics := getattr(self, "ddtree_metrics", None)) is not None:
                metrics.record(scheduler_stats, engine_idx)
            original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

        return record

    def prom_init(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, speculative_config: Any, *args: Any, **kwargs: Any) -> None:
            if is_ddtree(speculative_config):
                # A counter for every position that can be accepted, not for every node.
                depth = max_depth(speculative_config)
                speculative_config = SimpleNamespace(num_speculative_tokens=depth)
            original(self, speculative_config, *args, **kwargs)

        return init

    _replace(StatLoggerManager, "__init__", manager_init)
    _replace(StatLoggerManager, "record", manager_record)
    _replace(SpecDecodingProm, "__init__", prom_init)


def hook_checks(is_ddtree: Callable[[Any], bool], step_done: Callable[[Any, Any], None]) -> None:
    """Call `step_done` with the model state and the output of every step of a DDTree runner."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            if is_ddtree(self.vllm_config.speculative_config):
                step_done(self.model_state, output)
            return output

        return sample

    _replace(GPUModelRunner, "sample_tokens", sample_tokens)
