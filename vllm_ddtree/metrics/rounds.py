# SPDX-License-Identifier: Apache-2.0
"""What is counted of a round, and how it travels between vLLM's processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ddtree.round.kinds import RoundKind


@dataclass
class RoundCounts:
    """Counts of one step, or of many."""

    budget: int
    """Nodes a request that the last step had to draft."""
    nodes: int
    """Nodes that were verified."""
    rounds: list[int]
    """Rounds by kind."""
    ranks: list[int]
    """[top_k], accepted nodes by their rank among their position's candidates, best first."""
    tries: int = 0
    """Steps that drafted another budget than the best known one, to learn what it gives."""

    @classmethod
    def none(cls, top_k: int) -> RoundCounts:
        """Nothing counted."""
        return cls(0, 0, [0] * len(RoundKind), [0] * top_k)

    def add(self, other: RoundCounts) -> None:
        """Add a later step's counts."""
        self.budget = other.budget
        self.nodes += other.nodes
        self.tries += other.tries
        self.rounds = [a + b for a, b in zip(self.rounds, other.rounds, strict=True)]
        self.ranks = [a + b for a, b in zip(self.ranks, other.ranks, strict=True)]

    def pack(self) -> list[int]:
        """As numbers, for `unpack`."""
        return [self.budget, self.nodes, self.tries, *self.rounds, *self.ranks]

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> RoundCounts:
        """The counts that `pack` gave."""
        budget, nodes, tries, *rest = numbers
        return cls(budget, nodes, rest[: len(RoundKind)], rest[len(RoundKind) :], tries)
