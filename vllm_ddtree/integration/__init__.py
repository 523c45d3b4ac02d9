# SPDX-License-Identifier: Apache-2.0
"""The one package that knows vLLM's private names.

Everything of vLLM that is replaced, or used although it is not a public interface, is listed in
`SEAMS`; moving to the next vLLM release means editing this package.

- `check()` proves, without importing the heavy modules, that every seam is there (at `register()`).
- `hook_engine_args()` replaces the entry points through which a configuration is made (light).
- `hook_runner()` replaces the two factories of Model Runner V2 and what its steps and graphs begin
  with, `hook_capture()` the stream of these graphs, `hook_outputs()` and `hook_metrics()` places
  that statistics pass, `hook_sleep()` a worker's sleep, `hook_checks()` the end of a step. They run
  only in a process in which a DDTree configuration exists, so that an installed plugin changes
  nothing for other methods.
- The rest is what the plugin calls of vLLM by private names.

Every replacement calls the original for a configuration that is not DDTree's. vLLM's modules are
imported where they are used, none when this package is.
"""

from vllm_ddtree.integration.attention import (
    draft_backend_error,
    plans_ahead,
    reserve_mla_workspace,
    target_backend,
)
from vllm_ddtree.integration.drafter import (
    aux_layers,
    checkpoint_config,
    mask_token_id,
    tokenizer_vocabulary,
)
from vllm_ddtree.integration.dummy import dummy_draft, dummy_step, random_tokens
from vllm_ddtree.integration.engine_args import hook_engine_args
from vllm_ddtree.integration.graphs import (
    capture_apart,
    estimates_memory,
    full_graphs,
    hook_capture,
)
from vllm_ddtree.integration.metrics import hook_metrics, hook_outputs, new_spec_decoding_stats
from vllm_ddtree.integration.requests import hook_requests, request_limits
from vllm_ddtree.integration.runner import hook_checks, hook_runner
from vllm_ddtree.integration.sampler import request_chunks
from vllm_ddtree.integration.sleep import hook_sleep
from vllm_ddtree.integration.steps import Observer, observe_steps
from vllm_ddtree.integration.stop import add_error_output, model_runner_output, stop_with_error
from vllm_ddtree.integration.verify import SeamError, check, vllm_version

__all__ = [
    "Observer",
    "SeamError",
    "add_error_output",
    "aux_layers",
    "capture_apart",
    "check",
    "checkpoint_config",
    "draft_backend_error",
    "dummy_draft",
    "dummy_step",
    "estimates_memory",
    "full_graphs",
    "hook_capture",
    "hook_checks",
    "hook_engine_args",
    "hook_metrics",
    "hook_outputs",
    "hook_requests",
    "hook_runner",
    "hook_sleep",
    "mask_token_id",
    "model_runner_output",
    "new_spec_decoding_stats",
    "observe_steps",
    "plans_ahead",
    "random_tokens",
    "request_chunks",
    "request_limits",
    "reserve_mla_workspace",
    "stop_with_error",
    "target_backend",
    "tokenizer_vocabulary",
    "vllm_version",
]
