# SPDX-License-Identifier: Apache-2.0
"""In which blocks a step finds and leaves the states of its requests.

Without prefix caching a request has one block of states for as long as it runs. With it (vLLM's
mode "align") states are kept wherever the tokens reach a multiple of the block size: a request has
a column of blocks, as for keys and values, of which only some hold states. A step works in the
block of its last row; vLLM has copied the states there before the step begins
(v1/worker/gpu/model_states/mamba_hybrid.py, `preprocess_state`). A path may end before that block,
or lead over the boundary into it: then the states at the boundary go to the block before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.recurrent.commit import BlockMoves


class StateBlocks:
    """The blocks of a step, by KV group and place in the batch. Persistent, rewritten every step.

    Args:
        tables: int32 [max_num_reqs, columns] for each group, vLLM's block tables by place in the
            batch, at addresses that stay.
        block_size: tokens of a block; None if a request has one block.
        max_num_reqs: most requests of a step.

    """

    def __init__(
        self, tables: Sequence[torch.Tensor], block_size: int | None, max_num_reqs: int
    ) -> None:
        device = tables[0].device
        self._tables = list(tables)  # keeps them alive
        self._addresses = torch.tensor(
            [[table.data_ptr(), table.stride(0)] for table in tables],
            dtype=torch.int64,
            device=device,
        )
        self.block_size = block_size

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, max_num_reqs, dtype=torch.int32, device=device)

        self.indices = zeros(len(tables))
        """int32 [groups, max_num_reqs], the block a step works in; 0 (vLLM's null block) for a
        graph's padding."""
        self._before = zeros(len(tables))
        self._boundary_steps = zeros()

    def find(self, seq_lens: torch.Tensor, num_reqs: int, num_reqs_padded: int) -> None:
        """Fill `indices` for a step.

        Args:
            seq_lens: int32 [num_reqs or more], tokens of each request, the step's included.
            num_reqs: requests of the step.
            num_reqs_padded: the same, and a graph's padding.

        """
        if num_reqs_padded == 0:
            return
        _find_kernel[(num_reqs_padded,)](
            self._addresses,
            seq_lens,
            self.indices,
            self._before,
            num_reqs,
            self.indices.stride(0),
            BLOCK_SIZE=self.block_size or 0,
            GROUPS=len(self._tables),
        )

    def written(self, num_reqs: int) -> set[int]:
        """The blocks that a step of `num_reqs` requests may write; waits for the device."""
        both = torch.cat([self.indices[:, :num_reqs], self._before[:, :num_reqs]])
        return set(both.flatten().tolist()) - {0}

    def use(self, block: int) -> None:
        """Let all requests work in one block: for dummy steps, which only read it."""
        self.indices.fill_(block)

    def moves(
        self,
        prefix_lens: torch.Tensor,
        tail_lens: torch.Tensor,
        path_lens: torch.Tensor,
        num_reqs: int,
    ) -> BlockMoves | None:
        """Where the commit of a step's paths writes; None: to `indices`.

        Args:
            prefix_lens: int32 [num_reqs or more], tokens before each tree.
            tail_lens: int32 [num_reqs or more], tree rows of each request, 0 without a tree.
            path_lens: int32 [num_reqs or more], rows of each path, the root included.
            num_reqs: requests of the step.

        """
        if self.block_size is None or num_reqs == 0:
            return None
        _boundary_kernel[(num_reqs,)](
            prefix_lens,
            tail_lens,
            path_lens,
            self._before,
            self._boundary_steps,
            self._before.stride(0),
            BLOCK_SIZE=self.block_size,
            GROUPS=len(self._tables),
        )
        return BlockMoves(self.indices, self._boundary_steps, self._before)


@triton.jit(do_not_specialize=["num_reqs"])
def _find_kernel(
    tables_ptr,  # int64 [GROUPS, 2], address and stride
    seq_lens_ptr,  # [num_reqs]
    indices_ptr,  # [GROUPS, max_num_reqs]
    before_ptr,  # [GROUPS, max_num_reqs]
    num_reqs,
    stride,
    BLOCK_SIZE: tl.constexpr,  # 0: one block a request
    GROUPS: tl.constexpr,
):
    req = tl.program_id(0)
    there = req < num_reqs
    column = req * 0
    if BLOCK_SIZE > 0:
        seq_len = tl.load(seq_lens_ptr + req, mask=there, other=0)
        column = tl.maximum(seq_len - 1, 0) // BLOCK_SIZE
    for group in tl.static_range(GROUPS):
        table = tl.cast(tl.load(tables_ptr + 2 * group), tl.pointer_type(tl.int32))
        table += req * tl.load(tables_ptr + 2 * group + 1) + column
        block = tl.load(table, mask=there, other=0)
        before = tl.load(table - 1, mask=there & (column > 0), other=0)
        tl.store(indices_ptr + group * stride + req, block)
        tl.store(before_ptr + group * stride + req, before)


@triton.jit
def _boundary_kernel(
    prefix_lens_ptr,  # [num_reqs]
    tail_lens_ptr,  # [num_reqs]
    path_lens_ptr,  # [num_reqs]
    before_ptr,  # [GROUPS, max_num_reqs]
    boundary_steps_ptr,  # [max_num_reqs]
    stride,
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    req = tl.program_id(0)
    prefix_len = tl.load(prefix_lens_ptr + req)
    tail_len = tl.load(tail_lens_ptr + req)
    path_len = tl.minimum(tl.load(path_lens_ptr + req), tail_len)
    # The first token of the block that the step works in.
    boundary = (prefix_len + tail_len - 1) // BLOCK_SIZE * BLOCK_SIZE
    steps = boundary - prefix_len
    crossed = (path_len > 0) & (steps > 0) & (steps <= path_len)
    for group in tl.static_range(GROUPS):
        crossed = crossed & (tl.load(before_ptr + group * stride + req) > 0)
    tl.store(boundary_steps_ptr + req, tl.where(crossed, steps, 0))
