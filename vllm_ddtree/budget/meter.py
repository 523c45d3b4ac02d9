# SPDX-License-Identifier: Apache-2.0
"""What rounds have shown, counted on the device: path probabilities, rounds, accepted rows.

The builder and the walk add to the counts inside the graphs they run in; a copy goes to the host
every few rounds without anybody waiting for it. Requests that verify the spine alone are left out.
"""

from typing import Any

import torch

ONE = 1 << 20
"""Fixed-point one of the path probabilities."""
COPY_EVERY = 8
"""Rounds between two copies to the host."""

Counts = list[list[int]]
"""`Meter.counts` as numbers: [probability, rounds, accepted], each by row."""


class Meter:
    """Counts since the engine's start, by tree row (N = budget + 1; row 0 is the root).

    counts: int64 [3, N] on the device:
        [0, i]  sum over built trees of the path probability of row i, times 2^20 ([0, 0] / 2^20 is
                the number of trees)
        [1, i]  verified rounds of a request whose tree had i + 1 rows
        [2, i]  of these rounds, those that accepted row i
    """

    def __init__(self, budget: int, device: torch.device) -> None:
        self.counts = torch.zeros(3, budget + 1, dtype=torch.int64, device=device)
        pinned = self.counts.device.type == "cuda"
        self._mirror = torch.zeros(3, budget + 1, dtype=torch.int64, pin_memory=pinned)
        self._rounds = 0

    def publish(self) -> None:
        """Called once a round: now and then copies the counts to where `read` finds them."""
        if self._rounds % COPY_EVERY == 0:
            self._mirror.copy_(self.counts, non_blocking=True)
        self._rounds += 1

    def read(self) -> Counts:
        """The latest published counts, without waiting for the device."""
        return self._mirror.tolist()

    def reset(self) -> None:
        """Forget what dummy rounds have counted."""
        self.counts.zero_()
        self._mirror.zero_()


def read_meter(worker: Any) -> Counts:
    """The counts of a worker's model runner (sent to it as a function)."""
    return worker.model_runner.model_state.runtime.meter.read()
