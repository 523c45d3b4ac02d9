# SPDX-License-Identifier: Apache-2.0
"""All that the plugin changes in vLLM, on one page.

`PATCHES` are functions that are replaced; `install` and `remove` are the two loops over them.
`OBJECTS` are changes to single objects of an engine.
"""

from enum import Enum
from typing import NamedTuple

from vllm_ddtree import integration


class When(Enum):
    """When a function is replaced."""

    REGISTERED = "in every process that imports `EngineArgs`, by `register()`"
    CONFIGURED = "in a process in which a DDTree configuration exists"
    WORKER = "in a worker, when its DDTree model state is made"
    CHECKED = "as CONFIGURED, with VLLM_DDTREE_CHECK=1"


class Patch(NamedTuple):
    """A function of vLLM that is replaced."""

    target: str
    """"module:function" or "module:Class.method"."""
    wrapper: str
    """"module:function", (original) -> replacement."""
    when: When
    why: str
    users: tuple[str, ...] = ()
    """Modules that import a function by name, and get the replacement, too."""


_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_OURS = "vllm_ddtree.patches"

PATCHES = (
    # Configuration.
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        f"{_OURS}.engine_args:create_speculative_config",
        When.REGISTERED,
        "`method: ddtree` makes a DDTreeConfig.",
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        f"{_OURS}.engine_args:create_engine_config",
        When.REGISTERED,
        "The whole configuration is checked before weights load.",
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        f"{_OURS}.engine_args:add_cli_args",
        When.REGISTERED,
        "`--spec-method` takes `ddtree`.",
    ),
    Patch(
        "vllm.config.vllm:VllmConfig.num_lookahead_tokens",
        f"{_OURS}.engine_args:num_lookahead_tokens",
        When.CONFIGURED,
        "The draft block may be longer than budget + 1 tokens.",
    ),
    # Front-end.
    Patch(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        f"{_OURS}.requests:process_inputs",
        When.CONFIGURED,
        "A request that would stop the engine is refused.",
    ),
    Patch(
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        f"{_OURS}.metrics:manager_init",
        When.CONFIGURED,
        "The loggers also show what trees did.",
    ),
    Patch(
        "vllm.v1.metrics.loggers:StatLoggerManager.record",
        f"{_OURS}.metrics:manager_record",
        When.CONFIGURED,
        "Counts of trees are taken out of vLLM's statistics.",
    ),
    Patch(
        "vllm.v1.spec_decode.metrics:SpecDecodingProm.__init__",
        f"{_OURS}.metrics:prom_init",
        When.CONFIGURED,
        "Positions are counted by depth, not by node.",
    ),
    # Engine core and scheduler.
    Patch(
        "vllm.v1.engine.core:EngineCore.__init__",
        f"{_OURS}.engine_core:init",
        When.CONFIGURED,
        "Checks, auto budget and metrics follow the steps of its scheduler.",
    ),
    Patch(
        f"{_SCHEDULER}:Scheduler.schedule",
        f"{_OURS}.scheduler:schedule",
        When.CONFIGURED,
        "Drafts are cut to fit the step; the auto budget marks it to verify trees or chains.",
    ),
    Patch(
        f"{_SCHEDULER}:Scheduler.update_from_output",
        f"{_OURS}.scheduler:update_from_output",
        When.CONFIGURED,
        "Observers see a step's output before the scheduler takes it in.",
    ),
    Patch(
        f"{_SCHEDULER}:Scheduler.make_spec_decoding_stats",
        f"{_OURS}.scheduler:make_spec_decoding_stats",
        When.CONFIGURED,
        "A round is counted where vLLM counts a draft.",
    ),
    Patch(
        f"{_SCHEDULER}:Scheduler.make_stats",
        f"{_OURS}.scheduler:make_stats",
        When.CONFIGURED,
        "Counts of trees travel in vLLM's statistics.",
    ),
    # Model runner and graphs.
    Patch(
        "vllm.v1.worker.gpu.spec_decode:init_speculator",
        f"{_OURS}.runner:init_speculator",
        When.CONFIGURED,
        "The runner drafts with DDTree's speculator.",
        users=(_RUNNER,),
    ),
    Patch(
        "vllm.v1.worker.gpu.model_states:init_model_state",
        f"{_OURS}.runner:init_model_state",
        When.CONFIGURED,
        "The runner has DDTree's model state.",
        users=(_RUNNER,),
    ),
    Patch(
        f"{_RUNNER}:GPUModelRunner.execute_model",
        f"{_OURS}.runner:execute_model",
        When.CONFIGURED,
        "The model state learns whether the step is to verify chains, and whether its trees fit.",
    ),
    Patch(
        f"{_RUNNER}:GPUModelRunner.sample_tokens",
        f"{_OURS}.runner:sample_tokens",
        When.CHECKED,
        "What the checks of a step found leaves with its output.",
    ),
    Patch(
        f"{_RUNNER}:GPUModelRunner.capture_model",
        f"{_OURS}.graphs:capture_model",
        When.CONFIGURED,
        "All graphs of a runner are captured on one stream.",
    ),
    Patch(
        f"{_GRAPHS}:graph_capture",
        f"{_OURS}.graphs:graph_capture",
        When.CONFIGURED,
        "The stream that they share; the managers alone are meant, hence this module's name.",
    ),
    Patch(
        f"{_GRAPHS}:CudaGraphManager._init_candidates",
        f"{_OURS}.graphs:init_candidates",
        When.CONFIGURED,
        "Notes for the next row whether the budget is auto.",
    ),
    Patch(
        f"{_GRAPHS}:build_dynamic_sd_schedule_lookup",
        f"{_OURS}.graphs:schedule_lookup",
        When.CONFIGURED,
        "The auto budget has graphs for every budget that it may choose.",
    ),
    Patch(
        f"{_GRAPHS}:ModelCudaGraphManager.capture",
        f"{_OURS}.graphs:capture",
        When.CONFIGURED,
        "The auto budget's chains have graphs beside those of the trees.",
    ),
    Patch(
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin._set_active_loras",
        f"{_OURS}.runner:set_active_loras",
        When.CONFIGURED,
        "Every row that is sampled has its request's adapter.",
    ),
    Patch(
        "vllm.distributed.aux_output_connector.worker:AuxOutputWorkerConnector.prepare_output",
        f"{_OURS}.runner:prepare_output",
        When.WORKER,
        "The experts of an accepted path are returned, not those of a tree's first rows.",
    ),
    # State slots.
    Patch(
        "vllm.model_executor.layers.mamba.abstract:MambaBase.get_kv_cache_spec",
        f"{_OURS}.states:get_kv_cache_spec",
        When.CONFIGURED,
        "A request has one block of recurrent states, not one for every node.",
    ),
    Patch(
        "vllm.platforms.interface:Platform._align_hybrid_block_size",
        f"{_OURS}.states:align_hybrid_block_size",
        When.CONFIGURED,
        "The block is as large as the states are without drafts.",
    ),
    # Worker.
    Patch(
        "vllm.v1.worker.gpu_worker:Worker.sleep",
        f"{_OURS}.worker:sleep",
        When.WORKER,
        "The drafter's weights are kept over a level-2 sleep.",
    ),
    Patch(
        "vllm.v1.worker.gpu_worker:Worker.wake_up",
        f"{_OURS}.worker:wake_up",
        When.WORKER,
        "They are put back.",
    ),
    Patch(
        "vllm.v1.worker.gpu.async_utils:AsyncOutput.get_output",
        f"{_OURS}.worker:get_output",
        When.WORKER,
        "What is known of a round leaves the runner with its output.",
    ),
)


class Change(NamedTuple):
    """An attribute of an engine's own object that is set to something of ours."""

    attribute: str
    by: str
    """"module:function" or "module:Class.method"."""
    why: str
    passing: bool = False
    """Whether the function sets it back before it returns."""


OBJECTS = (
    Change(
        "AttentionLayer.attn_backend",
        "vllm_ddtree.attention.install:install_tree_attention",
        "A target layer's metadata builder knows the trees.",
    ),
    Change(
        "AttentionLayer.impl.__class__",
        "vllm_ddtree.attention.install:install_tree_attention",
        "A target layer attends along the trees.",
    ),
    Change(
        "QwenGatedDeltaNetAttention._forward_core",
        "vllm_ddtree.recurrent.kinds:set_delta_core",
        "A target's recurrent layer follows the trees.",
    ),
    Change(
        "QwenGatedDeltaNetAttention.get_attn_backend",
        "vllm_ddtree.recurrent.install:install_recurrent",
        "Its metadata builder knows the trees.",
    ),
    Change(
        "QwenGatedDeltaNetAttention.num_spec",
        "vllm_ddtree.recurrent.install:install_recurrent",
        "Its states have no room for drafts.",
    ),
    Change(
        "QwenGatedDeltaNetAttention.enable_fused_gdn_spec_decode",
        "vllm_ddtree.recurrent.kinds:set_delta_core",
        "It goes through `_forward_core`, not to a kernel for chains; with `gdn_decode_kernel`.",
    ),
    Change(
        "MambaMixer2.conv_ssm_forward",
        "vllm_ddtree.recurrent.kinds:set_mamba2_core",
        "A target's recurrent layer follows the trees; with `get_attn_backend` and `num_spec`.",
    ),
    Change(
        "Scheduler.dynamic_sd_lookup",
        "vllm_ddtree.budget.auto:attach",
        "The auto budget says how many nodes to draft.",
    ),
    Change(
        "Scheduler.ddtree_steps",
        "vllm_ddtree.integration.steps:follow",
        "By it the scheduler's patches know an engine of DDTree's.",
    ),
    Change(
        "GPUModelRunner.adaptive_verification",
        "vllm_ddtree.patches.runner:execute_model",
        "In a step whose requests share nodes, rows are as they share them.",
        passing=True,
    ),
    Change(
        "AuxOutputWorkerConnector.ddtree_runtime",
        "vllm_ddtree.patches.runner:execute_model",
        "By it the connector's patch finds the paths.",
    ),
    Change(
        "StatLoggerManager.ddtree_metrics",
        "vllm_ddtree.patches.metrics:manager_init",
        "By it its other patch knows one of DDTree's.",
    ),
    Change(
        "LoggingStatLogger.spec_decoding_logging",
        "vllm_ddtree.metrics.frontend:TreeMetrics.__init__",
        "vLLM's log line also says what trees did.",
    ),
    Change(
        "CudaGraphManager.graphs",
        "vllm_ddtree.graphs.chains:capture_chains",
        "A replay takes the graph of the step's form.",
    ),
    Change(
        "CudaGraphManager._capture_descs",
        "vllm_ddtree.integration.graphs:capture_apart",
        "Some graphs are captured once more.",
        passing=True,
    ),
    Change(
        "CudaGraphManager.compilation_config",
        "vllm_ddtree.graphs.draft:DraftGraphManager._init_candidates",
        "The draft forward has capture sizes of its own.",
        passing=True,
    ),
    Change(
        "ModelState.prepare_inputs",
        "vllm_ddtree.integration.dummy:like_text",
        "Rounds are measured with rows like those of text.",
        passing=True,
    ),
)


def install(when: When) -> None:
    """Replace the functions of these rows. Idempotent.

    Raises:
        ImportError: a module of vLLM is not there; nothing has been replaced.
        AttributeError: the same of a class or a function.

    """
    rows = [row for row in PATCHES if row.when is when]
    for row in rows:
        integration.resolve(row.target)
    for row in rows:
        owner, name = integration.resolve(row.wrapper)
        integration.replace(row.target, getattr(owner, name), row.users)


def remove() -> None:
    """Put vLLM's own functions back, all that were replaced."""
    for row in reversed(PATCHES):
        integration.restore(row.target, row.users)


def configured() -> None:
    """A DDTree configuration exists in this process: replace what it needs.

    Raises:
        ValueError: this vLLM is not supported.

    """
    from vllm_ddtree import invariants

    integration.require()
    install(When.CONFIGURED)
    if invariants.enabled():
        install(When.CHECKED)
