# SPDX-License-Identifier: Apache-2.0
"""Where Model Runner V2 makes its parts, runs a step and captures graphs."""

from collections.abc import Callable
from typing import Any

from vllm_ddtree.integration.replace import replace, replace_in_module


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

    replace(EngineCore, "__init__", engine_core_init)
    replace(ModelCudaGraphManager, "capture", capture_forms)
    replace(GPUModelRunner, "execute_model", execute_model)
    # Only the graph manager's use: which decode lengths get graphs.
    replace_in_module(
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

    replace_in_module(
        "vllm.v1.worker.gpu.spec_decode", (runner,), "init_speculator", init_speculator
    )
    replace_in_module(
        "vllm.v1.worker.gpu.model_states", (runner,), "init_model_state", init_model_state
    )


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

    replace(GPUModelRunner, "sample_tokens", sample_tokens)
