# SPDX-License-Identifier: Apache-2.0
"""The drafter's new context after a verify step: the accepted path's rows, in path order.

vLLM's DFlash speculator (v1/worker/gpu/spec_decode/dflash/speculator.py) combines the target's
auxiliary hidden states of every verified row and drops the last `num_rejected` rows of each
request. Only the path of a tree counts, max_depth + 1 rows at most. Only these rows are handed on,
so the drafter's work on its context grows with the depth, not with the budget.
"""

import copy
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.round.paths import Paths
from vllm_ddtree.round.trees import MAX_DEPTH

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class ContextRows:
    """Persistent buffers of the context of a batch in which every request has verified a tree.

    Args:
        max_num_reqs: most requests.
        rows: C, rows a request: the longest path, root included.
        device: where the buffers are.

    """

    def __init__(self, max_num_reqs: int, rows: int, device: torch.device) -> None:
        self.rows = rows

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.query_start_loc = torch.arange(
            0, max_num_reqs * self.rows + 1, self.rows, dtype=torch.int32, device=device
        )
        """int32 [max_num_reqs + 1], C apart."""
        self.query_start_loc_np = self.query_start_loc.cpu().numpy()
        """The same on the host."""
        self.positions = zeros(max_num_reqs * self.rows, torch.int64)
        """int64 [max_num_reqs * C], position of each row."""
        self.sources = zeros(max_num_reqs * self.rows, torch.int64)
        """int64 [max_num_reqs * C], row of the verify batch that each row is taken from."""
        self.num_rejected = zeros(max_num_reqs, torch.int32)
        """int32 [max_num_reqs], rows at each request's end that are on no path."""

    def gather(
        self,
        paths: Paths,
        batch: "InputBatch",
        aux_hidden_states: list[torch.Tensor],
        num_rejected: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> tuple["InputBatch", list[torch.Tensor], torch.Tensor]:
        """The batch, its auxiliary states and its rejected rows, with C rows a request.

        Args:
            paths: of the batch.
            batch: vLLM's, every request with a tree; not changed.
            aux_hidden_states: the target's, S of [num_tokens, hidden size] by row of the batch.
            num_rejected: int32 [num_reqs], rows of each request that are not on its path.
            out: [num_reqs * C or more, S * hidden size], where the states go; None: a new tensor.

        Returns:
            A copy of the batch for `DFlashSpeculator.propose`, one tensor [num_reqs * C, S * hidden
            size] in a list, and int32 [num_reqs]. They are views of the buffers, valid until the
            next call.

        Raises:
            ValueError: `out` has too few rows.

        """
        num_reqs, rows = batch.num_reqs, self.rows
        _context_rows_kernel[(num_reqs,)](
            batch.query_start_loc,
            num_rejected,
            batch.positions,
            paths.gather_index,
            self.positions,
            self.sources,
            self.num_rejected,
            rows,
            BLOCK=MAX_DEPTH + 1,  # one kernel for all reaches of the draft
            num_warps=1,
        )
        if out is None:
            columns = sum(state.shape[1] for state in aux_hidden_states)
            out = aux_hidden_states[0].new_empty(num_reqs * rows, columns)
        if out.shape[0] < num_reqs * rows:
            raise ValueError(
                f"{num_reqs} requests have {num_reqs * rows} context rows, but there is room for "
                f"{out.shape[0]}"
            )
        states = out[: num_reqs * rows]
        gather_states(aux_hidden_states, self.sources[: num_reqs * rows], states)
        compact = copy.copy(batch)
        compact.num_tokens = num_reqs * rows
        compact.num_scheduled_tokens = np.full(num_reqs, rows, dtype=np.int32)
        compact.query_start_loc = self.query_start_loc[: num_reqs + 1]
        compact.query_start_loc_np = self.query_start_loc_np[: num_reqs + 1]
        compact.positions = self.positions
        return compact, [states], self.num_rejected[:num_reqs]


@triton.jit(do_not_specialize=["num_rows"])
def _context_rows_kernel(
    query_start_loc_ptr,  # [num_reqs + 1], of the verify batch
    num_rejected_ptr,  # [num_reqs]
    positions_ptr,  # [num_tokens], linear
    gather_index_ptr,  # [num_tokens]
    out_positions_ptr,  # [num_reqs * num_rows]
    out_sources_ptr,  # [num_reqs * num_rows]
    out_num_rejected_ptr,  # [num_reqs]
    num_rows,  # a request
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    end = tl.load(query_start_loc_ptr + req + 1).to(tl.int64)
    length = end - start - tl.load(num_rejected_ptr + req)
    tl.store(out_num_rejected_ptr + req, (num_rows - length).to(tl.int32))
    j = tl.arange(0, BLOCK)
    on_path = j < length
    # Rows past the path are read by nobody, but must name a row there is.
    source = tl.load(gather_index_ptr + start + j, mask=on_path, other=start)
    position = tl.load(positions_ptr + start + j, mask=on_path, other=0)
    tl.store(out_sources_ptr + req * num_rows + j, source, mask=j < num_rows)
    tl.store(out_positions_ptr + req * num_rows + j, position, mask=j < num_rows)


def gather_states(
    states: list[torch.Tensor],
    sources: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Rows of several states side by side, in one launch.

    Args:
        states: S of [num_tokens, hidden size], contiguous in the last dimension.
        sources: int64 [n], row of the states that each output row is taken from.
        out: [n, S * hidden size], out.

    """
    hidden_size = states[0].shape[1]
    block = min(2048, triton.next_power_of_2(hidden_size))
    _gather_states_kernel[(sources.shape[0], triton.cdiv(hidden_size, block))](
        tuple(states),
        tuple(state.stride(0) for state in states),
        sources,
        out,
        out.stride(0),
        HIDDEN_SIZE=hidden_size,
        BLOCK=block,
    )


@triton.jit
def _gather_states_kernel(
    states_ptr,  # S of [num_tokens, HIDDEN_SIZE]
    strides,
    sources_ptr,  # [n]
    out_ptr,  # [n, S * HIDDEN_SIZE]
    out_stride,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources_ptr + row)
    out_ptr += row * out_stride
    for i in tl.static_range(len(states_ptr)):
        state = tl.load(states_ptr[i] + source * strides[i] + column, mask=column < HIDDEN_SIZE)
        tl.store(out_ptr + i * HIDDEN_SIZE + column, state, mask=column < HIDDEN_SIZE)
