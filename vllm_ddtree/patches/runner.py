# SPDX-License-Identifier: Apache-2.0
"""Where Model Runner V2 makes its parts and runs a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ddtree.presence import is_ddtree

if TYPE_CHECKING:
    import torch
    from vllm.config.vllm import VllmConfig
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    """`init_speculator`."""

    def init(vllm_config: VllmConfig, device: torch.device, req_states: Any) -> Any:
        if is_ddtree(vllm_config.speculative_config):
            from vllm_ddtree.config.loaded_drafter import check_draft_backend, check_loaded_drafter
            from vllm_ddtree.config.loaded_target import check_target_class
            from vllm_ddtree.proposer.conditional import make_speculator

            check_target_class(vllm_config)
            check_draft_backend(vllm_config)
            return make_speculator(vllm_config, device, check_loaded_drafter)
        return original(vllm_config, device, req_states)

    return init


def init_model_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """`init_model_state`."""

    def init(vllm_config: VllmConfig, model: Any, encoder_cache: Any, device: torch.device) -> Any:
        if is_ddtree(vllm_config.speculative_config):
            from vllm_ddtree.model_state import make_model_state
            from vllm_ddtree.patches import table

            table.install(table.When.WORKER)
            return make_model_state(vllm_config, model, encoder_cache, device)
        return original(vllm_config, model, encoder_cache, device)

    return init


def execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GPUModelRunner.execute_model`."""

    def execute(
        self: GPUModelRunner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        if is_ddtree(self.vllm_config.speculative_config):
            from vllm_ddtree.round.marks import (
                asks_for_chains,
                asks_for_narrow,
                shared_nodes,
                was_fitted,
            )

            runtime = self.model_state.runtime
            runtime.chains_asked = asks_for_chains(scheduler_output)
            runtime.narrow_asked = asks_for_narrow(scheduler_output)
            runtime.fitted = was_fitted(scheduler_output)
            if self.aux_output_connector is not None:
                self.aux_output_connector.ddtree_runtime = runtime
            nodes = shared_nodes(scheduler_output)
            runtime.shared = nodes is not None
            if nodes is not None:
                self.adaptive_verification = self.model_state.shared_rows.of_step(nodes)
                try:
                    return original(self, scheduler_output, *args, **kwargs)
                finally:
                    self.adaptive_verification = None
        return original(self, scheduler_output, *args, **kwargs)

    return execute


def sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GPUModelRunner.sample_tokens`, the end of a step."""

    def sample(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if is_ddtree(self.vllm_config.speculative_config):
            from vllm_ddtree.invariants import stop

            stop.put(self.model_state, output)
        return output

    return sample


def set_active_loras(original: Callable[..., None]) -> Callable[..., None]:
    """`LoRAModelRunnerMixin._set_active_loras`, of a step or of a dummy step."""

    def set_active(
        self: GPUModelRunner, prompt_lora_mapping: Any, *args: Any, **kwargs: Any
    ) -> None:
        if is_ddtree(self.vllm_config.speculative_config):
            from vllm_ddtree.workarounds import lora_logits

            if (num_logits := self.model_state.take_num_logits()) is not None:
                prompt_lora_mapping = lora_logits.by_row(prompt_lora_mapping, num_logits)
        original(self, prompt_lora_mapping, *args, **kwargs)

    return set_active


def prepare_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """`AuxOutputWorkerConnector.prepare_output`, between a step's walk and its commit.

    vLLM drops the last rows of each request, as many as drafts were rejected.
    """

    def prepare(self: AuxOutputWorkerConnector, *args: Any, **kwargs: Any) -> Any:
        pending = original(self, *args, **kwargs)
        runtime = getattr(self, "ddtree_runtime", None)
        if pending is not None and runtime is not None and runtime.step.verified:
            pending.routed_experts_gpu = runtime.paths.to_front(pending.routed_experts_gpu)
        return pending

    return prepare
