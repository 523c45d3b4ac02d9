# SPDX-License-Identifier: Apache-2.0
"""What the rounds of a trace show: acceptance by depth, by rank, and of every smaller budget.

A best-first tree of n nodes is the first n nodes of every larger one. So rounds of one budget tell
what every smaller budget would have accepted in them: the accepted rows up to row n.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ddtree.budget.tiers import CHAINS, TIERS
from vllm_ddtree.trace.read import Request, acceptance

FEW = 200
"""Rounds below which the numbers are rough."""
KEPT = 0.999
"""Share of the accepted nodes that a smaller `top_k` has to keep."""


@dataclass(frozen=True)
class Seen:
    """What was accepted, of rounds that verified trees."""

    rounds: int
    """Of trees."""
    nodes: int
    """Of their trees, at least."""
    reached: list[int]
    """By depth from 1: rounds in which the target had accepted the node before."""
    depths: list[int]
    """By depth from 1: rounds in which a node of it was accepted."""
    ranks: list[int]
    """Accepted nodes by rank, from 0."""
    accepted: dict[int, float]
    """Mean accepted nodes a round, by budget."""
    errors: dict[int, float]
    """Standard errors of these."""
    chains: dict[int, float]
    """Mean accepted nodes of the drafter's chain, by its length."""

    def length(self, budget: int) -> float:
        """Acceptance length of a budget."""
        return 1.0 + self.accepted[budget]

    def top_k(self) -> int:
        """The fewest candidates of a position that keep nearly all accepted nodes."""
        total, kept = sum(self.ranks), 0
        for rank, count in enumerate(self.ranks):
            kept += count
            if kept >= KEPT * total:
                return rank + 1
        return 1


def budgets(most: int) -> list[int]:
    """Budgets to look at, up to `most` nodes, ascending; that one is among them."""
    return sorted({0, *(tier for tier in TIERS if tier <= most), most})


def count(requests: Sequence[Request]) -> Seen:
    """Count a trace's rounds.

    Raises:
        ValueError: none of them verified a tree.

    """
    placed = [
        (request, number, each)
        for request in requests
        for number, each in enumerate(request.rounds)
        if each.form == "tree"
    ]
    if not placed:
        raise ValueError(
            "no round of the trace verified a tree: give texts without sampling parameters that "
            "need a chain, and a budget of at least 2"
        )
    # Trees that were cut, before a text's end for example, are left out.
    nodes = statistics.median_high(each.num_nodes for _, _, each in placed)
    placed = [entry for entry in placed if entry[2].num_nodes >= nodes]
    rounds = [each for _, _, each in placed]
    counts = acceptance(rounds)
    means, errors = {}, {}
    for budget in budgets(nodes):
        taken = [sum(0 < row <= budget for row in each.path) for each in rounds]
        means[budget], errors[budget] = _mean(taken)
    longest = max(len(each.chain) for each in rounds)
    chains = {}
    for length in sorted({*(chain for chain in CHAINS if chain <= longest), longest}):
        taken = [min(length, request.chain_taken(number)) for request, number, _ in placed]
        chains[length], _ = _mean(taken)
    return Seen(
        len(rounds),
        nodes,
        counts["reached"],
        counts["depths"],
        counts["ranks"],
        means,
        errors,
        chains,
    )


def _mean(values: Sequence[int]) -> tuple[float, float]:
    """Mean and its standard error."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))
