# SPDX-License-Identifier: Apache-2.0
"""The one package that knows vLLM's private names.

- `seams` lists everything of vLLM that is used, subclassed or replaced, with the parameters on
  which the plugin relies. `check()` proves, without importing the heavy modules, that all of it is
  there (at `register()`). Moving to the next vLLM release begins here.
- `replace()` and `restore()` replace a function of vLLM; `vllm_ddtree.patches.table` says which.
- `follow()` lets the package follow a scheduler's steps.
- The rest is what the plugin calls of vLLM by private names.

It imports nothing of the other packages. vLLM's modules are imported where they are used, none when
this package is.
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
from vllm_ddtree.integration.dummy import (
    dummy_adapters,
    dummy_draft,
    dummy_step,
    like_text,
)
from vllm_ddtree.integration.families import Family
from vllm_ddtree.integration.graphs import capture_apart, estimates_memory, full_graphs
from vllm_ddtree.integration.importing import when_imported
from vllm_ddtree.integration.metrics import new_spec_decoding_stats
from vllm_ddtree.integration.replace import replace, resolve, restore
from vllm_ddtree.integration.requests import request_limits
from vllm_ddtree.integration.sampler import request_chunks
from vllm_ddtree.integration.shared import reallocated
from vllm_ddtree.integration.steps import Observer, Steps, follow, observe_steps, steps_of
from vllm_ddtree.integration.stop import add_error_output, model_runner_output, stop_with_error
from vllm_ddtree.integration.verify import SeamError, check, require, vllm_version

__all__ = [
    "Family",
    "Observer",
    "SeamError",
    "Steps",
    "add_error_output",
    "aux_layers",
    "capture_apart",
    "check",
    "checkpoint_config",
    "draft_backend_error",
    "dummy_adapters",
    "dummy_draft",
    "dummy_step",
    "estimates_memory",
    "follow",
    "full_graphs",
    "like_text",
    "mask_token_id",
    "model_runner_output",
    "new_spec_decoding_stats",
    "observe_steps",
    "plans_ahead",
    "reallocated",
    "replace",
    "request_chunks",
    "request_limits",
    "require",
    "reserve_mla_workspace",
    "resolve",
    "restore",
    "steps_of",
    "stop_with_error",
    "target_backend",
    "tokenizer_vocabulary",
    "vllm_version",
    "when_imported",
]
