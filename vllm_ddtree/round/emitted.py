# SPDX-License-Identifier: Apache-2.0
"""What a step emits, and how the facts of its rounds travel with the tokens.

The walk writes tokens and facts side by side into one tensor. vLLM copies that tensor to the host
as the step's sampled tokens, so the facts need no copy of their own. `with_facts` takes them apart
on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    from vllm_ddtree.round.kinds import StepKinds


@dataclass
class Emitted:
    """What the requests of a step emit, written by the walk; P = max_depth + 1."""

    tokens_and_facts: torch.Tensor
    """int64 [num_reqs, 2 * P], `tokens` and `facts` side by side."""
    num_sampled: torch.Tensor
    """int32 [num_reqs], tokens of each request: its accepted nodes + 1."""

    @classmethod
    def empty(cls, num_reqs: int, max_depth: int, device: torch.device | str) -> Emitted:
        """Room for a step's tokens and facts."""
        size = 2 * (max_depth + 1)
        return cls(
            torch.empty(num_reqs, size, dtype=torch.int64, device=device),
            torch.empty(num_reqs, dtype=torch.int32, device=device),
        )

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [num_reqs, P] view, accepted tokens, then the bonus token."""
        return self.tokens_and_facts[:, : self.tokens_and_facts.shape[1] // 2]

    @property
    def facts(self) -> torch.Tensor:
        """int64 [num_reqs, P] view, the nodes that could be accepted, then each accepted one's
        rank among the candidates of its draft position."""
        return self.tokens_and_facts[:, self.tokens_and_facts.shape[1] // 2 :]

    def part(self, start: int, end: int) -> Emitted:
        """Views of requests `start` to `end`."""
        return Emitted(self.tokens_and_facts[start:end], self.num_sampled[start:end])


@dataclass
class StepFacts:
    """A verify step on the host, by request in the order of `ModelRunnerOutput.req_ids`."""

    kinds: StepKinds
    """How each request verified."""
    walked: np.ndarray
    """uint8 [num_reqs, P], `Emitted.facts`."""


def with_facts(
    get_output: Callable[[AsyncOutput], ModelRunnerOutput], async_output: AsyncOutput
) -> ModelRunnerOutput:
    """vLLM's output of a step, with the facts of a verify step as the attribute `ddtree_facts`.

    The attribute goes with the output through pickle.

    Args:
        get_output: vLLM's `AsyncOutput.get_output` (v1/worker/gpu/async_utils.py).
        async_output: the step's AsyncOutput; its sampled tokens are cut to the tokens.

    """
    kinds = getattr(async_output.sampler_output, "kinds", None)
    if kinds is None:
        return get_output(async_output)
    both = async_output.sampled_token_ids  # NumPy int64 [num_reqs, 2 P]; may still be on its way
    half = both.shape[1] // 2
    async_output.sampled_token_ids = both[:, :half]
    output = get_output(async_output)
    output.ddtree_facts = StepFacts(kinds, both[:, half:].astype(np.uint8))
    return output
