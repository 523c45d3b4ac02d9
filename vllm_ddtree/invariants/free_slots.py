# SPDX-License-Identifier: Apache-2.0
"""A step writes the KV slots of its own rows and no other one.

The bits of every slot are summed before the target's forward, and once more after the commit. A
slot whose sum has changed must be one of the step's rows. Both passes read the whole cache.

Recurrent states lie in the same memory: a block is either slots or a state. The blocks of the
step's states are written, too.
"""

from collections.abc import Collection, Sequence

import torch

from vllm_ddtree.commit.target import Compactors
from vllm_ddtree.invariants.stop import Broken
from vllm_ddtree.round.step import Step

INVARIANT = "free slots are never written"
_SAME_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class FreeSlots:
    """The target's caches before a step.

    Args:
        step: the step.
        compactors: of the target's caches.
        tables: by KV group int32 [num_reqs or more, blocks], blocks of the step's requests.
        seq_lens: int32 [num_reqs or more], tokens of each request with the step's rows.
        state_blocks: blocks in which the step works on recurrent states.
        num_state_blocks: blocks of states that the caches' memory is; 0 without recurrent layers.

    """

    def __init__(
        self,
        step: Step,
        compactors: Compactors,
        tables: Sequence[torch.Tensor],
        seq_lens: torch.Tensor,
        state_blocks: Collection[int] = (),
        num_state_blocks: int = 0,
    ) -> None:
        self._step = step
        self._compactors = compactors
        self._state_blocks = state_blocks
        self._num_state_blocks = num_state_blocks
        lengths = seq_lens[: step.num_reqs].tolist()
        self._blocks = {
            gid: [
                # Block 0 stands for blocks that fell out of a window.
                set(row[: -(-length // compactor.block_size)]) - {0}
                for row, length in zip(tables[gid][: step.num_reqs].tolist(), lengths, strict=True)
            ]
            for gid, compactor in compactors
        }
        self._before = self._sums()

    def _sums(self) -> list[torch.Tensor]:
        """Per cache: int64 [num_blocks, block_size]."""
        return [
            cache.view(_SAME_SIZE[cache.element_size()]).sum(dim=(1, 3), dtype=torch.int64)
            for _, compactor in self._compactors
            for cache in compactor.caches
        ]

    def check(self) -> Broken:
        """What to tell the requests in whose blocks a slot was written that is no row's.

        Raises:
            RuntimeError: such a slot lies in no block of the step's requests. Nobody can tell whose
                data it was, so the engine must not go on.

        """
        step = self._step
        assert step.slot_mappings is not None
        # Groups may share a cache.
        rows = torch.cat([step.slot_mappings[gid] for gid, _ in self._compactors]).unique()
        broken: Broken = {}
        changes = iter(zip(self._before, self._sums(), strict=True))
        for gid, compactor in self._compactors:
            for number in range(len(compactor.caches)):
                before, after = next(changes)
                written = (before != after).flatten().nonzero().flatten()
                stray = written[~torch.isin(written, rows)].tolist()
                if not stray:
                    continue
                blocks = {slot // compactor.block_size for slot in stray}
                if self._num_state_blocks:
                    # A cache may have several blocks of slots in the place of one of states.
                    parts = compactor.caches[number].shape[0] // self._num_state_blocks
                    blocks = {b for b in blocks if b // parts not in self._state_blocks}
                if not blocks:
                    continue
                message = (
                    f"{INVARIANT}: KV group {gid}, cache {number}: slots {stray[:8]} of blocks "
                    f"{sorted(blocks)[:8]} were written and are no row's of the step"
                )
                owners = [
                    name
                    for name, mine in zip(step.req_ids, self._blocks[gid], strict=True)
                    if mine & blocks
                ]
                if blocks - set().union(*self._blocks[gid]):
                    raise RuntimeError(
                        f"ddtree invariant broken: {message}; they belong to no request of the "
                        f"step, which has {step.req_ids}"
                    )
                for name in owners:
                    broken.setdefault(name, f"{message}; they belong to {owners}")
        return broken
