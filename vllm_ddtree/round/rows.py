# SPDX-License-Identifier: Apache-2.0
"""What every token row of a verify batch needs to know about its tree.

Before the target runs, one kernel turns the trees of the batch's requests into arrays by row
(DDTree, arXiv 2604.12989, tree attention). `Layout` says which rows belong to which tree.
"""

from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm_ddtree.round.layout import Layout
    from vllm_ddtree.round.paths import Paths
    from vllm_ddtree.round.trees import TreeBuffers


class RowBuffers:
    """Persistent arrays of the verify batch, by row and by request, rewritten every round.

    W = ceil((budget + 1) / 32) words hold a row's ancestor bits: bit b of word w stands for tree
    row 32 * w + b.

    Args:
        max_num_tokens: most rows in a batch.
        max_num_reqs: most requests in a batch.
        budget: most nodes of a tree.
        device: where the arrays are.

    Raises:
        ValueError: the budget is not positive.

    """

    def __init__(
        self, max_num_tokens: int, max_num_reqs: int, budget: int, device: torch.device
    ) -> None:
        if budget < 1:
            raise ValueError(f"budget must be at least 1 node, got {budget}")
        self.budget = budget
        self.num_words = triton.cdiv(budget + 1, 32)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        """int64 [max_num_tokens], RoPE position; the root's position + depth for tree rows."""
        self.masks = torch.zeros(max_num_tokens, self.num_words, dtype=torch.int32, device=device)
        """int32 [max_num_tokens, W], ancestor bits, own bit included; 0 outside trees."""
        self.tail_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        """int32 [max_num_reqs], tree rows, root included; 0 without a tree."""
        self.prefix_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        """int32 [max_num_reqs], keys before the tree rows; 0 without a tree."""


def prepare_rows(
    trees: "TreeBuffers",
    rows: RowBuffers,
    paths: "Paths",
    layout: "Layout",
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_reqs_padded: int,
    num_tokens_padded: int,
    max_query_len: int,
    roots_alone: bool = False,
) -> None:
    """Fill `rows` for a batch, in one launch and without a host synchronisation.

    Padded requests get no tail. Rows after the last real one, up to `num_tokens_padded`, get
    position 0 and mask 0.

    Args:
        trees: read.
        rows: written.
        paths: `gather_index` is reset: every entry becomes its own index.
        layout: requests of the batch; a tree has at most budget + 1 rows.
        seq_lens: int32 [num_reqs or more], keys of each request, its own rows included.
        positions: int64 [num_tokens or more], vLLM's linear positions; may be `rows.positions`.
        num_reqs_padded: requests, padding included.
        num_tokens_padded: rows, padding included.
        max_query_len: rows of the longest request; it sizes the grid and does not change the
            result.
        roots_alone: whether a request with one logit verifies a tree that is a root alone.

    Raises:
        ValueError: the padded batch exceeds the buffers, or the trees have another budget.

    """
    if num_tokens_padded > rows.positions.shape[0] or num_reqs_padded > rows.tail_lens.shape[0]:
        raise ValueError(
            f"a batch of {num_reqs_padded} requests and {num_tokens_padded} rows exceeds the row "
            f"buffers ({rows.tail_lens.shape[0]} requests, {rows.positions.shape[0]} rows)"
        )
    max_tail = rows.budget + 1
    if trees.depths.shape[1] != max_tail or trees.masks.shape[1:] != (max_tail, rows.num_words):
        raise ValueError(
            f"the trees hold {trees.depths.shape[1] - 1} nodes, the row buffers {rows.budget}"
        )

    block = 64
    # One request more than there are: it takes the padding rows.
    grid = (num_reqs_padded + 1, max(1, triton.cdiv(max_query_len, block)))
    _prepare_rows_kernel[grid](
        trees.depths,
        trees.masks,
        layout.indices,
        layout.query_start_loc,
        layout.cu_num_logits,
        seq_lens,
        positions,
        rows.positions,
        rows.masks,
        paths.gather_index,
        rows.tail_lens,
        rows.prefix_lens,
        layout.num_reqs,
        num_reqs_padded,
        num_tokens_padded,
        1 if roots_alone else 2,
        MAX_TAIL=max_tail,
        NUM_WORDS=rows.num_words,
        BLOCK_WORDS=triton.next_power_of_2(rows.num_words),
        BLOCK=block,
    )


# The counts change every round: specialising on them would compile during serving.
@triton.jit(do_not_specialize=["num_reqs", "num_reqs_padded", "num_tokens_padded", "least"])
def _prepare_rows_kernel(
    depths_ptr,  # [S, MAX_TAIL]
    masks_ptr,  # [S, MAX_TAIL, NUM_WORDS]
    indices_ptr,  # [num_reqs]
    query_start_loc_ptr,  # [num_reqs + 1]
    cu_num_logits_ptr,  # [num_reqs + 1]
    seq_lens_ptr,  # [num_reqs]
    positions_ptr,  # [num_tokens]
    row_positions_ptr,  # [max_num_tokens]
    row_masks_ptr,  # [max_num_tokens, NUM_WORDS]
    gather_index_ptr,  # [max_num_tokens]
    tail_lens_ptr,  # [max_num_reqs]
    prefix_lens_ptr,  # [max_num_reqs]
    num_reqs,
    num_reqs_padded,
    num_tokens_padded,
    least,
    MAX_TAIL: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    words = tl.arange(0, BLOCK_WORDS)

    if req < num_reqs:
        start = tl.load(query_start_loc_ptr + req)
        end = tl.load(query_start_loc_ptr + req + 1)
        index = tl.load(indices_ptr + req).to(tl.int64)
        num_logits = tl.load(cu_num_logits_ptr + req + 1) - tl.load(cu_num_logits_ptr + req)
        tail_len = tl.where((num_logits >= least) & (index >= 0), num_logits, 0)
        if first == 0:
            tl.store(tail_lens_ptr + req, tail_len)
            prefix_len = tl.load(seq_lens_ptr + req) - tail_len
            tl.store(prefix_lens_ptr + req, tl.where(tail_len > 0, prefix_len, 0))
        root = end - tail_len
        # Tree rows read the root's linear position only, and it is rewritten with the same value:
        # the input may be the output.
        root_position = tl.load(positions_ptr + root, mask=tail_len > 0, other=0)
        for i in range(start + first, end, step):
            row = i + tl.arange(0, BLOCK)
            in_req = row < end
            in_tree = in_req & (row >= root)
            node = (row - root).to(tl.int64)
            depth = tl.load(depths_ptr + index * MAX_TAIL + node, mask=in_tree, other=0)
            linear = tl.load(positions_ptr + row, mask=in_req & (row < root), other=0)
            position = tl.where(in_tree, root_position + depth, linear)
            tl.store(row_positions_ptr + row, position, mask=in_req)
            tl.store(gather_index_ptr + row, row.to(tl.int64), mask=in_req)
            mask_word = tl.load(
                masks_ptr + (index * MAX_TAIL + node[:, None]) * NUM_WORDS + words[None, :],
                mask=in_tree[:, None] & (words[None, :] < NUM_WORDS),
                other=0,
            )
            tl.store(
                row_masks_ptr + row[:, None].to(tl.int64) * NUM_WORDS + words[None, :],
                mask_word,
                mask=in_req[:, None] & (words[None, :] < NUM_WORDS),
            )
    elif req < num_reqs_padded:
        if first == 0:
            tl.store(tail_lens_ptr + req, 0)
            tl.store(prefix_lens_ptr + req, 0)
    else:
        # Position 0 is always a valid index of the RoPE table.
        num_rows = tl.load(query_start_loc_ptr + num_reqs)
        for i in range(num_rows + first, num_tokens_padded, step):
            row = i + tl.arange(0, BLOCK)
            in_padding = row < num_tokens_padded
            tl.store(row_positions_ptr + row, tl.zeros([BLOCK], tl.int64), mask=in_padding)
            tl.store(gather_index_ptr + row, row.to(tl.int64), mask=in_padding)
            tl.store(
                row_masks_ptr + row[:, None].to(tl.int64) * NUM_WORDS + words[None, :],
                tl.zeros([BLOCK, BLOCK_WORDS], tl.int32),
                mask=in_padding[:, None] & (words[None, :] < NUM_WORDS),
            )
