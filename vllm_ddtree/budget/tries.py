# SPDX-License-Identifier: Apache-2.0
"""Tries: a few steps of a budget that is not the best known one, to learn whether it has become so.

Two things show in tries alone. While nothing is drafted, no round says whether drafts would be
accepted by now: a *sample* does. And a budget that is never served keeps the cost that was measured
at start, however wrong that is: *timing* it shows what it costs.

Tries are paid from allowances, shares of the time served. So a cheap try is made often and a dear
one seldom, at every load, and all of them together never cost more than those shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ddtree.budget.auto import Choice

SAMPLE_SHARE = 0.007
"""Of the time served, what samples may cost."""
TIMING_SHARE = 0.004
"""The same of timing."""
LEAST_PRICE = 0.05
"""What a try costs at least, as a share of its rounds: what it is expected to gain is a guess."""
SAVED = 60.0
"""Seconds whose allowance can be saved."""
LONGEST_WAIT = 1.0
"""Seconds between two looks that count as served at most: an engine may have been idle."""
TIMING_STEPS = 8
"""Steps of a try that shows what a round costs. The first three are not timed (auto.py)."""
SAMPLE_ROUNDS = 32
"""Rounds (of one request) that a try of drafts should show."""
SAMPLE_STEPS = 4
"""Its most steps."""


class Tries:
    """The allowance, and the try in progress."""

    def __init__(self) -> None:
        self.choice: Choice | None = None
        """What is tried; None: nothing."""
        self.count = 0
        """Tries so far."""
        self.spent_ms = 0.0
        """What they were expected to cost, altogether."""
        self._saved = {SAMPLE_SHARE: 0.0, TIMING_SHARE: 0.0}
        self._left = 0

    def earn(self, seconds: float) -> None:
        """So many seconds have been served."""
        served = min(max(seconds, 0.0), LONGEST_WAIT)
        for share, saved in self._saved.items():
            self._saved[share] = min(share * SAVED, saved + share * served)

    def start(self, choice: Choice, share: float, steps: int, ms: float) -> bool:
        """Begin a try, if it can be paid.

        Args:
            choice: to try.
            share: `SAMPLE_SHARE` or `TIMING_SHARE`.
            steps: that draft it.
            ms: what they are expected to cost beyond what they give.

        Returns:
            Whether it begins.

        """
        ms = max(0.0, ms)
        if self.choice is not None or 1e-3 * ms > self._saved[share]:
            return False
        self.choice, self._left = choice, steps
        self.count += 1
        self.spent_ms += ms
        self._saved[share] -= 1e-3 * ms
        return True

    def step(self) -> None:
        """A step has been scheduled."""
        self._left -= 1
        if self._left <= 0:
            self.choice = None
