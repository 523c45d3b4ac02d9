# SPDX-License-Identifier: Apache-2.0
"""The checks of a step, in the order in which a round comes by them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from vllm_ddtree.invariants.free_slots import FreeSlots
from vllm_ddtree.invariants.step import MovedRows, check_step
from vllm_ddtree.invariants.stop import Broken, of_all_ranks

if TYPE_CHECKING:
    import torch

    from vllm_ddtree.commit.target import Compactors
    from vllm_ddtree.round.runtime import Runtime


class Checks:
    """What `VLLM_DDTREE_CHECK=1` looks at in each step of a model runner.

    Args:
        others_write: whether a KV connector may write slots between two looks, as it does when it
            brings blocks from elsewhere. Then free slots are not looked at.

    """

    def __init__(self, others_write: bool = False) -> None:
        self._others_write = others_write
        self._in_step = False
        self._broken: Broken = {}
        self._free_slots: FreeSlots | None = None
        self._moved: MovedRows | None = None

    def before_forward(
        self,
        runtime: Runtime,
        compactors: Compactors,
        block_tables: Sequence[torch.Tensor],
        seq_lens: torch.Tensor,
        state_blocks: Collection[int] = (),
        num_state_blocks: int = 0,
    ) -> None:
        """Note what the target's caches hold.

        Args:
            runtime: the engine's, the step prepared.
            compactors: of the target's caches.
            block_tables: by KV group int32 [num_reqs or more, blocks].
            seq_lens: int32 [num_reqs or more], tokens of each request with the step's rows.
            state_blocks, num_state_blocks: as of `FreeSlots`.

        """
        self._in_step = True
        if not self._others_write:
            self._free_slots = FreeSlots(
                runtime.step, compactors, block_tables, seq_lens, state_blocks, num_state_blocks
            )

    def before_commit(
        self,
        runtime: Runtime,
        compactors: Compactors,
        indices: torch.Tensor,
        num_sampled: torch.Tensor,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Check the trees and their paths; arguments as of `check_step`."""
        self._broken, self._moved = check_step(
            runtime, compactors, indices, num_sampled, num_computed_tokens
        )

    def after_commit(self) -> None:
        """Check what was moved, and that nothing else was written."""
        if self._moved is not None:
            self._broken |= self._moved.check()
            self._moved = None
        if self._in_step:
            written = self._free_slots.check() if self._free_slots is not None else {}
            self._broken = of_all_ranks(written | self._broken)
            self._free_slots, self._in_step = None, False

    def take_broken(self) -> Broken:
        """What the checks of the last step found."""
        broken, self._broken = self._broken, {}
        return broken
