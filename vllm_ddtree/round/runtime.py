# SPDX-License-Identifier: Apache-2.0
"""What the parts of one engine share: trees by request, and the rows and paths of the present step.

A runtime belongs to one model runner. The runner's parts find it by the identity of their
VllmConfig, so engines that live one after another (or side by side) in a process never meet.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ddtree.round.meter import Meter
from vllm_ddtree.round.paths import Paths
from vllm_ddtree.round.rows import RowBuffers
from vllm_ddtree.round.step import Step
from vllm_ddtree.round.trees import TreeBuffers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


@dataclass
class Runtime:
    """State shared by speculator, model state, attention and sampler of one engine."""

    budget: int
    """Most nodes of a tree."""
    max_depth: int
    """Deepest node that there can be: the depth limit, or the budget where that is smaller."""
    top_k: int
    """Candidates of a draft position."""
    trees: TreeBuffers
    """The trees, by request."""
    rows: RowBuffers
    """The rows of the step in progress."""
    paths: Paths
    """The accepted paths of the step in progress."""
    meter: Meter
    """What the rounds have shown so far."""
    chains_asked: bool = False
    """Whether the scheduler (or a capture) wants the step's trees verified as chains."""
    narrow_asked: bool = False
    """Whether the scheduler wants the step to draft with few masks."""
    narrow_drafted: bool = False
    """Whether the latest trees were drafted with few masks."""
    shared: bool = False
    """Whether the requests of the step share its nodes."""
    fitted: bool = False
    """Whether the scheduler has seen to it that the step's trees fit; not so in warm-up steps."""
    step: Step = field(default_factory=Step)
    """The step in progress, as the host knows it."""
    attention_words: str = ""
    """How the target verifies (start-up line)."""
    state_words: str = ""
    """What the states of its recurrent layers cost (start-up line); empty without such layers."""

    @property
    def num_rows(self) -> int:
        """Rows of a request's tree: root and nodes."""
        return self.budget + 1


_runtimes: dict[int, Runtime] = {}


def create(vllm_config: VllmConfig, device: torch.device) -> Runtime:
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
        paths=Paths.empty(max_num_reqs, spec.max_depth, max_num_tokens, device),
        meter=Meter(spec.budget, device),
    )
    key = id(vllm_config)
    _runtimes[key] = runtime
    weakref.finalize(vllm_config, _runtimes.pop, key, None)
    return runtime


def take(vllm_config: VllmConfig) -> Runtime:
    """The runtime created for exactly this configuration object; handed over once.

    From here on it lives and goes with the runner's own parts, whoever else may keep the
    configuration.
    """
    return _runtimes.pop(id(vllm_config))
