# SPDX-License-Identifier: Apache-2.0
"""What one engine's DDTree parts share: the trees by request slot and the rows of the present step.

A runtime belongs to one model runner. The runner's parts find it by the identity of their
VllmConfig, so engines that live one after another (or side by side) in a process never meet.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_ddtree.round.kinds import StepKinds
from vllm_ddtree.round.meter import Meter
from vllm_ddtree.round.rows import RowBuffers
from vllm_ddtree.round.trees import TreeBuffers


@dataclass
class Step:
    """Host-side facts of the verify step in progress."""

    has_trees: bool = False
    """Whether any request verifies drafts that are no chain: the attention needs the tree."""
    max_verify_len: int = 0
    """Rows of the longest request that verifies drafts, rows before its tree included; 0: none."""
    num_tree_rows: int = 0
    """Rows of all trees."""
    as_chains: bool = False
    """Whether the trees of the batch were turned into chains."""
    has_plain_rows: bool = True
    """Whether any row of the batch belongs to no tree (prefill, plain decode)."""
    in_graph: bool = False
    """Whether the step is a CUDA graph's capture or its dummy replay."""
    verified: bool = False
    """Whether the tree sampler ran, so that there is a path to commit."""
    num_reqs: int = 0
    req_ids: list[str] = field(default_factory=list)
    query_start_loc: torch.Tensor | None = None
    """[num_reqs + 1] int32."""
    slot_mappings: torch.Tensor | None = None
    """[num_kv_groups, num_tokens] int64, the target's slots by row."""
    kinds: StepKinds | None = None
    """How each request verifies; None in a graph's capture."""


@dataclass
class Runtime:
    """State shared by speculator, model state, attention and sampler of one engine."""

    budget: int
    max_depth: int
    """Deepest node that there can be: the depth limit, or the budget where that is smaller."""
    top_k: int
    trees: TreeBuffers
    rows: RowBuffers
    path_rows: torch.Tensor
    """[max_num_reqs, max_depth + 1] int32: tree row of each path element, root first."""
    path_lens: torch.Tensor
    """[max_num_reqs] int32: path elements, root included."""
    meter: Meter
    chains_asked: bool = False
    """Whether the scheduler (or a capture) wants the step's trees verified as chains."""
    step: Step = field(default_factory=Step)
    attention_form: str = ""
    """How the target verifies, in words (start-up line)."""

    @property
    def num_rows(self) -> int:
        """Rows of a request's tree: root and nodes."""
        return self.budget + 1


_runtimes: dict[int, Runtime] = {}


def create(vllm_config: Any, device: torch.device) -> Runtime:
    """A runtime for this configuration's runner, kept until taken or the configuration goes."""
    spec = vllm_config.speculative_config
    scheduler = vllm_config.scheduler_config
    max_num_reqs, max_num_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    runtime = Runtime(
        budget=spec.budget,
        max_depth=spec.max_depth,
        top_k=spec.top_k,
        trees=TreeBuffers(max_num_reqs, spec.budget, device),
        rows=RowBuffers(max_num_tokens, max_num_reqs, spec.budget, device),
        path_rows=torch.zeros(max_num_reqs, spec.max_depth + 1, dtype=torch.int32, device=device),
        path_lens=torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
        meter=Meter(spec.budget, device),
    )
    key = id(vllm_config)
    _runtimes[key] = runtime
    weakref.finalize(vllm_config, _runtimes.pop, key, None)
    return runtime


def take(vllm_config: Any) -> Runtime:
    """The runtime created for exactly this configuration object; handed over once.

    From here on it lives and goes with the runner's own parts, whoever else may keep the
    configuration.
    """
    return _runtimes.pop(id(vllm_config))
