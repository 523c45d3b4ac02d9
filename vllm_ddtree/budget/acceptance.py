# SPDX-License-Identifier: Apache-2.0
"""How many nodes a budget accepts: the trees' own path probabilities, corrected by what is seen.

A best-first tree of n nodes is the first n nodes of every larger one. So one count by row serves
all budgets: the accepted nodes of budget n are the chances of rows 1 to n, summed.

A row's chance is its mean path probability times a correction: observed over predicted acceptance
in the rounds that verified the row, by ranges of rows. A range that no round has verified lately
takes the correction of the range before it.

The rows of a chain are the depths of the most probable path; their first correction is that of the
trees. Path probabilities come from drafts of the longest reach only, which may be few of the rounds
(proposer/reach.py).
"""

import itertools
import math
from collections.abc import Sequence

from vllm_ddtree.round.meter import ONE, Reading

RANGES = ((1, 1), (2, 3), (4, 5), (6, 7), (8, 11), (12, 15), (16, 23), (24, 31), (32, 255))
"""First and last row of each range with a correction of its own."""
PRIOR = {0: 0.0, 1: 0.8, 3: 1.5, 7: 2.2, 15: 2.6, 31: 3.0, 63: 3.25, 255: 3.6}
"""Accepted nodes before anything is known: a middling drafter."""
CHAIN_PRIOR = 0.85
"""Accepted nodes of a chain over those of a tree with as many, before anything is known."""
PRIOR_ROUNDS = 50
"""Rounds that count as much as what was known before them."""
FADE = 0.97
"""Weight that what was known keeps when a look at the meter finds no new round. So while nothing is
drafted, it fades to the prior, and drafting is tried again."""
WINDOW = 4000
"""Rounds (of one request) over which counts are averaged."""


def prior(budget: int) -> float:
    """Accepted nodes of a budget before anything is known."""
    for (low, below), (high, above) in itertools.pairwise(PRIOR.items()):
        if budget <= high:
            return below + (above - below) * (budget - low) / (high - low)
    return PRIOR[255]


class Acceptance:
    """Accepted nodes expected of each budget.

    Args:
        max_depth: most nodes that a round can accept.

    """

    def __init__(self, max_depth: int = 255) -> None:
        self._max_depth = max_depth
        self._last: Reading = []
        self._trees = self._rounds = 0.0

    def update(self, counts: Reading) -> None:
        """Take the meter's counts since the engine's start (`Meter.read`)."""
        if not self._last:
            self._last = [[0] * len(row) for row in counts]
            self._sums = [[0.0] * len(row) for row in counts]
        new = [
            [now - before for now, before in zip(*rows, strict=True)]
            for rows in zip(counts, self._last, strict=True)
        ]
        self._last = counts
        rounds = _rounds(new)
        decay = math.exp(-rounds / WINDOW) if rounds else FADE
        self._sums = [
            [old * decay + more for old, more in zip(*rows, strict=True)]
            for rows in zip(self._sums, new, strict=True)
        ]
        self._trees, self._rounds = self._sums[0][0] / ONE, _rounds(self._sums)

    def expected(self, budget: int, chain: bool = False) -> float:
        """Accepted nodes a round of a tree, or of a chain, of `budget` nodes.

        Never more than the budget or the depth.
        """
        most = float(min(budget, self._max_depth))
        before = prior(budget) * (CHAIN_PRIOR if chain else 1.0)
        if self._trees <= 0.0:
            return min(most, before)
        total, claimed = _corrected(self._sums[:3], budget, 1.0)
        if chain and claimed > 0.0:
            # No chain is better than the best tree of as many nodes.
            total = min(total, _corrected(self._sums[3:], budget, total / claimed)[0])
        weight = self._rounds / (self._rounds + PRIOR_ROUNDS)
        return min(most, weight * total + (1.0 - weight) * before)


def _rounds(counts: Sequence[Sequence[float]]) -> float:
    """Rounds behind the counts: trees built, or rounds verified if those are more."""
    return max(counts[0][0], counts[1][0] + counts[4][0]) / ONE


def _corrected(sums: list[list[float]], budget: int, correction: float) -> tuple[float, float]:
    """Accepted nodes of `budget`: after correction, and by the path probabilities alone.

    Args:
        sums: probability built, probability verified, accepted, by row (round/meter.py).
        budget: nodes.
        correction: for rows before any was verified.

    """
    probability, verified, accepted = sums
    total, claimed = 0.0, 0.0
    for first, last in RANGES:
        rows = range(first, min(last + 1, len(accepted)))
        chances = [probability[row] / probability[0] for row in rows]
        mean = sum(chances)
        predicted = sum(verified[row] for row in rows) / ONE
        seen = sum(accepted[row] for row in rows)
        if mean > 0.0:
            known = PRIOR_ROUNDS * mean
            correction = (seen + correction * known) / (predicted + known)
        used = sum(chances[: max(0, budget + 1 - first)])
        total += correction * used
        claimed += used
        if last >= budget:
            break
    return total, claimed
