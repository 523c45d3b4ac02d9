# SPDX-License-Identifier: Apache-2.0
"""What the recurrent layers need to know about the tree rows of a step, made once a round.

The rows of all trees are numbered through, request after request: what a layer stashes for the
commit lies under these numbers, so that its size follows the rows and not the requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm_ddtree.round.trees import TreeBuffers


class RecurrentRows:
    """Persistent arrays over the tree rows of a step, rewritten every round.

    Args:
        max_tree_rows: most tree rows of a step.
        max_num_reqs: most requests of a step.
        width: taps of the short convolution, the row's own included.
        device: where the arrays lie.

    Raises:
        ValueError: there is no convolution to prepare (`width` below 2), or no row.

    """

    def __init__(
        self, max_tree_rows: int, max_num_reqs: int, width: int, device: torch.device | str
    ) -> None:
        if width < 2 or max_tree_rows < 1:
            raise ValueError(
                f"a convolution has at least 2 taps and a step at least 1 tree row, got {width} "
                f"and {max_tree_rows}"
            )
        self.width = width
        self.max_tree_rows = max_tree_rows
        self.starts = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        """int32 [max_num_reqs], number of each request's root."""
        self.taps = torch.zeros(max_tree_rows, width - 1, dtype=torch.int32, device=device)
        """int32 [max_tree_rows, width - 1], the rows a row's convolution reads, nearest first: a
        row of the same tree, or -1 - j for the j-th newest committed input."""


def prepare_recurrent_rows(
    trees: TreeBuffers,
    rows: RecurrentRows,
    idx_mapping: torch.Tensor,
    tail_lens: torch.Tensor,
    num_reqs: int,
    num_tree_rows: int,
) -> None:
    """Fill `rows` for this batch, in one launch and without a host synchronisation.

    Args:
        trees: `parents` of the batch's requests.
        idx_mapping: int64 [num_reqs or more], index of each request; not read without a tree.
        tail_lens: int32 [num_reqs or more], tree rows of each request, 0 without a tree.
        num_reqs: requests of the batch; those after it (a graph's padding) have no tree.
        num_tree_rows: sum of `tail_lens`, as the host knows it.

    Raises:
        ValueError: the step has more tree rows than the buffers.

    """
    if num_tree_rows > rows.max_tree_rows:
        raise ValueError(
            f"{num_tree_rows} tree rows in a step exceed the {rows.max_tree_rows} that recurrent "
            "layers can hold"
        )
    if num_reqs == 0:
        return
    _prepare_kernel[(num_reqs,)](
        trees.parents,
        idx_mapping,
        tail_lens,
        rows.starts,
        rows.taps,
        num_reqs,
        NUM_ROWS=trees.parents.shape[1],
        TAPS=rows.width - 1,
        BLOCK=triton.next_power_of_2(trees.parents.shape[1]),
        BLOCK_REQS=triton.next_power_of_2(rows.starts.shape[0]),
    )


# The count changes every round: specialising on it would compile during serving.
@triton.jit(do_not_specialize=["num_reqs"])
def _prepare_kernel(
    parents_ptr,  # [S, NUM_ROWS]
    idx_mapping_ptr,  # [num_reqs]
    tail_lens_ptr,  # [num_reqs]
    starts_ptr,  # [max_num_reqs]
    taps_ptr,  # [max_tree_rows, TAPS]
    num_reqs,
    NUM_ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
):
    req = tl.program_id(0)
    reqs = tl.arange(0, BLOCK_REQS)
    lens = tl.load(tail_lens_ptr + reqs, mask=reqs < num_reqs, other=0)
    start = tl.sum(tl.where(reqs < req, lens, 0), 0)
    tl.store(starts_ptr + req, start)

    tail_len = tl.load(tail_lens_ptr + req)
    if tail_len == 0:
        return
    parents_ptr += tl.load(idx_mapping_ptr + req).to(tl.int64) * NUM_ROWS
    node = tl.arange(0, BLOCK)
    in_tree = node < tail_len
    at = node
    committed = tl.zeros([BLOCK], tl.int32)
    for tap in tl.static_range(TAPS):
        at = tl.load(parents_ptr + at, mask=in_tree & (at >= 0), other=-1)
        committed -= tl.where(at < 0, 1, 0)
        place = (start + node).to(tl.int64) * TAPS + tap
        tl.store(taps_ptr + place, tl.where(at >= 0, at, committed), mask=in_tree)
