# SPDX-License-Identifier: Apache-2.0
"""What rounds have shown, counted on the device: path probabilities, rounds, accepted rows.

The builder and the walk add to the counts inside the graphs they run in. Every few rounds a copy
goes to the host, and nobody waits for it. Requests that verify their chain alone are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_ddtree.round.trees import TreeBuffers

ONE = 1 << 20
"""Fixed-point one of the path probabilities."""
COPY_EVERY = 4
"""Rounds between two copies to the host."""

Reading = list[list[int]]
"""`Meter.totals` as numbers, by row: probability built, probability verified, accepted; then the
same of chains."""


@dataclass(frozen=True)
class Counts:
    """Where the walk counts the rows of a step, all trees or all chains."""

    claims: torch.Tensor
    """int32 [max_num_reqs, N] by index, path probability of each row; one for all rows where only
    the rows are counted."""
    totals: torch.Tensor
    """int64 [2, N], added to: `claims` of the verified rows, and accepted rows."""


class Meter:
    """Counts since the engine's start, by tree row (N = budget + 1; row 0 is the root)."""

    def __init__(self, budget: int, device: torch.device) -> None:
        self.totals = torch.zeros(8, budget + 1, dtype=torch.int64, device=device)
        """int64 [8, N] on the device:

        [0, i]  sum over built trees of the path probability of row i, times 2^20; [0, 0] / 2^20 is
                the number of trees. Only drafts of the longest reach count (proposer/reach.py):
                shorter ones have no deep rows.
        [1, i]  the same sum over the verified rounds that had row i
        [2, i]  of these rounds, those that accepted row i
        [3, i] to [5, i]  the same of chains: row i is the most probable token of depth i
        [6, i]  rounds that verified row i of a tree drafted with few masks, times 2^20
        [7, i]  of these rounds, those that accepted row i
        """
        pinned = self.totals.device.type == "cuda"
        # The CPU named: vLLM builds models with the GPU as default device.
        self._mirror = torch.zeros(
            8, budget + 1, dtype=torch.int64, device="cpu", pin_memory=pinned
        )
        self._ones = torch.full((1, budget + 1), ONE, dtype=torch.int32, device=device)
        self._nowhere = torch.zeros(2, budget + 1, dtype=torch.int64, device=device)
        self._rounds = 0

    @property
    def built(self) -> torch.Tensor:
        """int64 [2, N] view, what the builder adds to: trees, chains."""
        return self.totals[:6:3]

    def verified(self, trees: TreeBuffers, as_chains: bool, narrow: bool = False) -> Counts:
        """What the walk reads and adds to in a step of trees, or of chains.

        Args:
            trees: of the step.
            as_chains: whether they are verified as chains.
            narrow: whether they were drafted with few masks. Their path probabilities say nothing
                of other drafts.

        """
        if narrow:
            ones = self._ones.expand(trees.claims.shape[0], -1)
            return Counts(ones, self._nowhere if as_chains else self.totals[6:])
        totals = self.totals[4:6] if as_chains else self.totals[1:3]
        return Counts(trees.claims[:, int(as_chains)], totals)

    def publish(self) -> None:
        """Called once a round: now and then copies the counts to where `read` finds them."""
        if self._rounds % COPY_EVERY == 0:
            self._mirror.copy_(self.totals, non_blocking=True)
        self._rounds += 1

    def read(self) -> Reading:
        """The latest published counts, without waiting for the device."""
        return self._mirror.tolist()

    def reset(self) -> None:
        """Forget what dummy rounds have counted."""
        self.totals.zero_()
        self._mirror.zero_()


def read_meter(worker: Worker) -> Reading:
    """The counts of a worker's model runner (sent to it as a function)."""
    return worker.model_runner.model_state.runtime.meter.read()
