# SPDX-License-Identifier: Apache-2.0
"""What is counted of a round, and how it travels between vLLM's processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_ddtree.round.kinds import RoundKind, StepKinds


@dataclass
class StepFacts:
    """A verify step, by request in the order of `ModelRunnerOutput.req_ids`; P = depth + 1."""

    kinds: StepKinds
    walked: np.ndarray
    """uint8 [num_reqs, P], the walk's facts: the nodes that could be accepted, then the rank of
    each accepted one."""


def with_facts(get_output: Callable[[Any], Any], async_output: Any) -> Any:
    """vLLM's output of a step (its AsyncOutput.get_output), with the facts of a verify step.

    They come in the right half of the sampled tokens (TreeRejectionSampler) and leave as an
    attribute, which goes with the output through pickle.
    """
    kinds = getattr(async_output.sampler_output, "kinds", None)
    if kinds is None:
        return get_output(async_output)
    wide = async_output.sampled_token_ids  # NumPy int64 [num_reqs, 2 P]; may still be on its way
    half = wide.shape[1] // 2
    async_output.sampled_token_ids = wide[:, :half]
    output = get_output(async_output)
    output.ddtree_facts = StepFacts(kinds, wide[:, half:].astype(np.uint8))
    return output


@dataclass
class RoundCounts:
    """Counts of one step, or of many."""

    budget: int
    """Nodes a request that the last step had to draft."""
    nodes: int
    rounds: list[int]
    """By kind."""
    ranks: list[int]
    """[top_k], accepted nodes by their rank among their position's candidates, best first."""

    @classmethod
    def none(cls, top_k: int) -> "RoundCounts":
        """Nothing counted."""
        return cls(0, 0, [0] * len(RoundKind), [0] * top_k)

    def add(self, other: "RoundCounts") -> None:
        """Add a later step's counts."""
        self.budget = other.budget
        self.nodes += other.nodes
        self.rounds = [a + b for a, b in zip(self.rounds, other.rounds, strict=True)]
        self.ranks = [a + b for a, b in zip(self.ranks, other.ranks, strict=True)]

    def pack(self) -> list[int]:
        """As numbers, for `unpack`."""
        return [self.budget, self.nodes, *self.rounds, *self.ranks]

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> "RoundCounts":
        """The counts that `pack` gave."""
        budget, nodes, *rest = numbers
        return cls(budget, nodes, rest[: len(RoundKind)], rest[len(RoundKind) :])
