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

from __future__ import annotations

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
PRIOR_ROUNDS = 3
"""Rounds that count as much as the prior."""
SMOOTH = 5
"""Rounds of a range that count as much as the correction of the range before it."""
WINDOW = 2.0
"""Seconds after which a third of what was seen is left, however many requests there are."""
LEAST = 200
"""Rounds (of one request) that are kept however old they are. While nothing is drafted, few rounds
come, and the prior must not take their place."""
LATE = 0.3
"""The same of the latest rounds alone, in seconds."""
LATE_LEAST = 32
"""The same in rounds."""
TURN = 1e-4
"""If the latest rounds are less likely than that, given those before, the texts have turned: what
was seen before counts no more."""
ALIKE = 1.5
"""Rounds that tell as much as one that is independent of all others: texts go on as they began."""
NARROW_ROW = 6
"""Of the meter: rounds of narrow drafts by row, and behind it those that accepted the row."""
NARROW_PRIOR = 0.8
"""Accepted nodes of a tree from a narrow draft over those of others, before anything is known. That
is too little for it to be chosen untried."""
NARROW_MEMORY = 120.0
"""Seconds after which a third of what narrow drafts have shown is left: it is the drafter's nature,
not the texts'."""
NARROW_KNOWN = 200
"""Rounds after which it is known how much narrow drafts accept."""
KNOWN = 30
"""Rounds after which what was seen decides, not the prior."""


def prior(budget: int) -> float:
    """Accepted nodes of a budget before anything is known."""
    for (low, below), (high, above) in itertools.pairwise(PRIOR.items()):
        if budget <= high:
            return below + (above - below) * (budget - low) / (high - low)
    return PRIOR[255]


class Window:
    """Sums of counts, in which old ones fade.

    Args:
        seconds: after which a third is left.
        least: rounds that are kept, however old.

    """

    def __init__(self, seconds: float, least: float) -> None:
        self._seconds, self._least = seconds, least
        self.sums: list[list[float]] = []
        self.rounds = 0.0

    def add(self, new: Reading, seconds: float) -> None:
        """Counts of the last so many seconds."""
        if not self.sums:
            self.sums = [[0.0] * len(row) for row in new]
        decay = math.exp(-seconds / self._seconds)
        if self.rounds > 0.0:
            decay = max(decay, min(1.0, (self._least - _rounds(new)) / self.rounds))
        self.sums = [
            [old * decay + more for old, more in zip(*rows, strict=True)]
            for rows in zip(self.sums, new, strict=True)
        ]
        self.rounds = _rounds(self.sums)

    def replace(self, new: Reading) -> None:
        """Know of trees, or chains, what these counts show; if they show none, what was known."""
        for built in (0, 3):
            if new[built][0]:
                self.sums[built] = [float(count) for count in new[built]]
            if new[built + 1][0]:
                for row in (built + 1, built + 2):
                    self.sums[row] = [float(count) for count in new[row]]
        self.rounds = _rounds(self.sums)

    def first_rows(self) -> tuple[float, float]:
        """Rounds verified, and those that accepted the first row, in trees and chains alike."""
        sums = self.sums
        return (sums[1][0] + sums[4][0]) / ONE, sums[2][1] + sums[5][1]


class Acceptance:
    """Accepted nodes expected of each budget.

    Texts change while they are served: slowly, and then what was seen fades; or at once, for
    example from code to prose. Then the latest rounds are most unlikely, given those before, and
    only the newest of them count.

    Args:
        max_depth: most nodes that a round can accept.

    """

    def __init__(self, max_depth: int = 255) -> None:
        self._max_depth = max_depth
        self._last: Reading = []
        self._seen = 0.0
        self._all, self._late = Window(WINDOW, LEAST), Window(LATE, LATE_LEAST)
        self._narrow = [0.0, 0.0, 0.0]
        """Of trees from narrow drafts: rounds, nodes accepted, nodes that others would have had."""
        self.turns = 0
        """Times that the texts have turned."""

    def update(self, counts: Reading, now: float) -> None:
        """Take the meter's counts since the engine's start (`Meter.read`), at `now` seconds."""
        if not self._last:
            self._last = [[0] * len(row) for row in counts]
        new = [
            [now - before for now, before in zip(*rows, strict=True)]
            for rows in zip(counts, self._last, strict=True)
        ]
        self._last = counts
        passed = now - self._seen
        if len(new) > NARROW_ROW and new[NARROW_ROW][0]:
            self._add_narrow(new[NARROW_ROW], new[NARROW_ROW + 1], passed)
        new = new[:NARROW_ROW]
        if _rounds(new) <= 0.0:
            return  # nothing was seen, so what is known stays
        self._seen = now
        self._late.add(new, passed)
        if self._all.rounds > 0.0 and self._turned():
            self.turns += 1
            self._all.replace(new)
            self._late.replace(new)
        else:
            self._all.add(new, passed)

    def _add_narrow(self, rounds: list[int], accepted: list[int], passed: float) -> None:
        """Compare trees from narrow drafts with what trees of the same rows accept by now."""
        last = max(row for row, count in enumerate(rounds) if count)
        usual = [self.expected(row) for row in range(last + 1)]
        expected = sum(
            (usual[row] - usual[row - 1]) * rounds[row] / ONE for row in range(1, last + 1)
        )
        decay = math.exp(-passed / NARROW_MEMORY)
        new = (rounds[0] / ONE, float(sum(accepted[1:])), expected)
        self._narrow = [old * decay + more for old, more in zip(self._narrow, new, strict=True)]

    def narrow(self, budget: int) -> tuple[float, float]:
        """Accepted nodes of a tree from a narrow draft: expected, and what they may be at most."""
        usual = self.expected(budget)
        rounds, accepted, expected = self._narrow
        share = min(1.0, accepted / expected) if expected > 0.0 else NARROW_PRIOR
        weight = min(1.0, rounds / NARROW_KNOWN)
        likely = weight * share + (1.0 - weight) * min(share, NARROW_PRIOR)
        return usual * likely, usual * (share if weight >= 1.0 else 1.0)

    def _turned(self) -> bool:
        """Whether the latest rounds do not go with all those before."""
        rounds, accepted = self._all.first_rows()
        late, late_accepted = self._late.first_rows()
        if rounds < ALIKE or late < ALIKE:
            return False
        chance = (accepted + 1) / (rounds + 2)
        if tail(late_accepted / ALIKE, late / ALIKE, chance) < TURN:
            return True
        # The drafter claims as much as before, and is right more often, or less.
        seen, expected = self._expected_late()
        alike = ALIKE * (1 + expected / late)  # a path is accepted, or not, from a row on
        return few(seen / alike, expected / alike) < TURN

    def _expected_late(self) -> tuple[float, float]:
        """Nodes that the latest rounds accepted, and would have, as right as the claims were."""
        seen = expected = 0.0
        for form in (1, 4):  # trees, chains
            claims, accepted = self._all.sums[form], self._all.sums[form + 1]
            late_claims, late_accepted = self._late.sums[form], self._late.sums[form + 1]
            for first, last in RANGES:
                rows = slice(first, last + 1)
                if (claimed := sum(claims[rows])) > 0.0:
                    expected += sum(accepted[rows]) / claimed * sum(late_claims[rows])
                    seen += sum(late_accepted[rows])
        return seen, expected

    @property
    def rounds(self) -> float:
        """Rounds (of one request) that count at present."""
        return self._all.rounds

    @property
    def known(self) -> bool:
        """Whether enough rounds were seen for them to decide, not the prior."""
        return self.rounds >= KNOWN

    def expected(self, budget: int, chain: bool = False) -> float:
        """Accepted nodes a round of a tree, or of a chain, of `budget` nodes.

        Never more than the budget or the depth.
        """
        most = float(min(budget, self._max_depth))
        before = prior(budget) * (CHAIN_PRIOR if chain else 1.0)
        rounds, sums = self._all.rounds, self._all.sums
        if not sums or sums[0][0] <= 0.0:
            return min(most, before)
        total, claimed = _corrected(sums[:3], budget, 1.0)
        if chain and claimed > 0.0:
            # No chain is better than the best tree of as many nodes.
            total = min(total, _corrected(sums[3:], budget, total / claimed)[0])
        weight = rounds / (rounds + PRIOR_ROUNDS)
        return min(most, weight * total + (1.0 - weight) * before)


def tail(seen: float, rounds: float, chance: float) -> float:
    """How likely so few successes, or so many, are at most (Chernoff's bound)."""
    share = min(1.0, max(0.0, seen / rounds))
    apart = 0.0
    for part, expected in ((share, chance), (1.0 - share, 1.0 - chance)):
        if part > 0.0:
            apart += part * math.log(part / expected)
    return math.exp(min(0.0, -rounds * apart))


def few(seen: float, expected: float) -> float:
    """How likely so few events, or so many, are at most, if they come one by one (the same)."""
    if expected <= 0.0:
        return 1.0
    apart = expected - seen + (seen * math.log(seen / expected) if seen > 0.0 else 0.0)
    return math.exp(min(0.0, -apart))


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
            known = SMOOTH * mean
            correction = (seen + correction * known) / (predicted + known)
        used = sum(chances[: max(0, budget + 1 - first)])
        total += correction * used
        claimed += used
        if last >= budget:
            break
    return total, claimed
