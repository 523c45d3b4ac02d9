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
"""`Meter.counts` as numbers, by row: probability built, probability verified, accepted; the same of
chains."""


class Meter:
    """Counts since the engine's start, by tree row (N = budget + 1; row 0 is the root).

    counts: int64 [6, N] on the device:
        [0, i]  sum over built trees of the path probability of row i, times 2^20 ([0, 0] / 2^20 is
                the number of trees); without trees of shorter drafts than the longest
                (proposer/reach.py), which have no deep rows
        [1, i]  the same sum over the verified rounds that had row i
        [2, i]  of these rounds, those that accepted row i
        [3, i] to [5, i]  the same of chains: row i is the most probable token of depth i
    """

    def __init__(self, budget: int, device: torch.device) -> None:
        self.counts = torch.zeros(6, budget + 1, dtype=torch.int64, device=device)
        pinned = self.counts.device.type == "cuda"
        # The CPU named: vLLM builds models with the GPU as default device.
        self._mirror = torch.zeros(
            6, budget + 1, dtype=torch.int64, device="cpu", pin_memory=pinned
        )
        self._rounds = 0

    @property
    def probabilities(self) -> torch.Tensor:
        """[2, N] view, what the builder adds to: trees, chains."""
        return self.counts[::3]

    def accepted(self, as_chains: bool) -> torch.Tensor:
        """[2, N] view, what the walk adds to: probabilities verified, accepted rows."""
        return self.counts[4:] if as_chains else self.counts[1:3]

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
