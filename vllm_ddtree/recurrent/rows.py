# SPDX-License-Identifier: Apache-2.0
"""What the recurrent layers need to know about the tree rows of a step, made once a round.

The rows of all trees are numbered through, request after request: what a layer stashes for the
commit lies under these numbers, so that its size follows the rows and not the requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm_ddtree.round.trees import TreeBuffers

BLOCK_ROWS = 32
"""Rows of a tree that the verify kernel takes at once.

Products of 64 rows go to Hopper's warp-group instructions, and with those Triton 3.6 gave wrong
outputs here; 32 rows do not."""


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

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.width = width
        self.max_tree_rows = max_tree_rows
        self.starts = zeros(max_num_reqs)
        """int32 [max_num_reqs], number of each request's root."""
        self.lens = zeros(max_num_reqs)
        """int32 [max_num_reqs], tree rows of each request; 0 without a tree."""
        self.taps = zeros(max_tree_rows, width - 1)
        """int32 [max_tree_rows, width - 1], the rows a row's convolution reads, nearest first: a
        row of the same tree, or -1 - j for the j-th newest committed input."""
        self.levels = zeros(max_tree_rows)
        """int32 [max_tree_rows], ancestors of a row in its block of BLOCK_ROWS rows of the tree."""


@dataclass(frozen=True)
class TreeStep:
    """The tree rows of one step, as every layer of a KV group takes them."""

    rows: RecurrentRows
    """Of this step."""
    masks: torch.Tensor
    """int32 [T, W], ancestor bits of tree rows, own bit included."""
    query_start_loc: torch.Tensor
    """int32 [R + 1], first row of each request."""
    tail_lens: torch.Tensor
    """int32 [at least R], tree rows at the end of each request, 0 without a tree."""
    state_indices: torch.Tensor
    """int32 [at least R], block of each request's states."""
    max_tail: int
    """Upper bound of `tail_lens`."""
    max_depth: int
    """Upper bound of the rows' depths."""

    @property
    def num_reqs(self) -> int:
        """R, a graph's padding included."""
        return self.query_start_loc.shape[0] - 1

    @property
    def block_rows(self) -> int:
        """Rows of a tree that a program takes at once: a power of two, 16 to BLOCK_ROWS."""
        return min(BLOCK_ROWS, max(16, triton.next_power_of_2(self.max_tail)))


def prepare_recurrent_rows(
    trees: TreeBuffers,
    rows: RecurrentRows,
    idx_mapping: torch.Tensor,
    tail_lens: torch.Tensor,
    num_reqs: int,
    num_tree_rows: int,
    num_reqs_padded: int | None = None,
    cut: bool = False,
) -> None:
    """Fill `rows` for this batch, in one launch and without a host synchronisation.

    Args:
        trees: `parents` and `masks` of the batch's requests.
        rows: what is filled.
        idx_mapping: int64 [num_reqs or more], index of each request; not read without a tree.
        tail_lens: int32 [num_reqs or more], tree rows of each request, 0 without a tree.
        num_reqs: requests of the batch.
        num_tree_rows: sum of `tail_lens`, as the host knows it.
        num_reqs_padded: `num_reqs` and a graph's padding, which has no tree; if not given, there
            is no padding.
        cut: whether trees that do not fit are left out. vLLM's warm-up has such steps.

    Raises:
        ValueError: the step has more tree rows than the buffers, and `cut` is not given.

    """
    if num_tree_rows > rows.max_tree_rows and not cut:
        raise ValueError(
            f"{num_tree_rows} tree rows in a step exceed the {rows.max_tree_rows} that recurrent "
            "layers can hold"
        )
    num_reqs_padded = max(num_reqs, num_reqs_padded or 0)
    if num_reqs_padded == 0:
        return
    _prepare_kernel[(num_reqs_padded,)](
        trees.parents,
        trees.masks,
        idx_mapping,
        tail_lens,
        rows.starts,
        rows.lens,
        rows.taps,
        rows.levels,
        num_reqs,
        rows.max_tree_rows,
        NUM_ROWS=trees.parents.shape[1],
        NUM_WORDS=trees.masks.shape[2],
        TAPS=rows.width - 1,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK=triton.next_power_of_2(trees.parents.shape[1]),
        BLOCK_REQS=triton.next_power_of_2(rows.starts.shape[0]),
    )


# The count changes every round: specialising on it would compile during serving.
@triton.jit(do_not_specialize=["num_reqs", "max_tree_rows"])
def _prepare_kernel(
    parents_ptr,  # [S, NUM_ROWS]
    masks_ptr,  # [S, NUM_ROWS, NUM_WORDS]
    idx_mapping_ptr,  # [num_reqs]
    tail_lens_ptr,  # [num_reqs]
    starts_ptr,  # [max_num_reqs]
    lens_ptr,  # [max_num_reqs]
    taps_ptr,  # [max_tree_rows, TAPS]
    levels_ptr,  # [max_tree_rows]
    num_reqs,
    max_tree_rows,
    NUM_ROWS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
):
    req = tl.program_id(0)
    reqs = tl.arange(0, BLOCK_REQS)
    lens = tl.load(tail_lens_ptr + reqs, mask=reqs < num_reqs, other=0)
    start = tl.sum(tl.where(reqs < req, lens, 0), 0)
    tl.store(starts_ptr + req, start)

    tail_len = tl.load(tail_lens_ptr + req, mask=req < num_reqs, other=0)
    tail_len = tl.where(start + tail_len <= max_tree_rows, tail_len, 0)
    tl.store(lens_ptr + req, tail_len)
    if tail_len == 0:
        return
    first_row = tl.load(idx_mapping_ptr + req).to(tl.int64) * NUM_ROWS
    parents_ptr += first_row
    masks_ptr += first_row * NUM_WORDS
    node = tl.arange(0, BLOCK)
    in_tree = node < tail_len
    number = (start + node).to(tl.int64)
    at = node
    committed = tl.zeros([BLOCK], tl.int32)
    for tap in tl.static_range(TAPS):
        at = tl.load(parents_ptr + at, mask=in_tree & (at >= 0), other=-1)
        committed -= tl.where(at < 0, 1, 0)
        tl.store(taps_ptr + number * TAPS + tap, tl.where(at >= 0, at, committed), mask=in_tree)

    level = tl.full([BLOCK], -1, tl.int32)  # a row is on its own path
    bit = tl.arange(0, 32)
    for word in tl.static_range(NUM_WORDS):
        in_block = in_tree & (node // BLOCK_ROWS == word * 32 // BLOCK_ROWS)
        mask = tl.load(masks_ptr + node * NUM_WORDS + word, mask=in_block, other=0)
        level += tl.sum((mask[None, :] >> bit[:, None]) & 1, 0)
    tl.store(levels_ptr + number, level, mask=in_tree)


@triton.jit
def on_path(masks_ptr, stride, num_words, node, in_tree, first, BLOCK_M: tl.constexpr):
    """bool [BLOCK_M, BLOCK_M]: whether row first + j is on the path to row `node` of a tree."""
    j = tl.arange(0, BLOCK_M)
    word = first // 32
    bits = tl.load(masks_ptr + node * stride + word, mask=in_tree, other=0)[:, None]
    if BLOCK_M > 32:
        high = tl.zeros([BLOCK_M], tl.int32)
        if word + 1 < num_words:
            high = tl.load(masks_ptr + node * stride + word + 1, mask=in_tree, other=0)
        bits = tl.where(j[None, :] < 32, bits, high[:, None])
    return ((bits >> ((first + j) % 32)[None, :]) & 1) != 0
