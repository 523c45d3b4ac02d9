# SPDX-License-Identifier: Apache-2.0
"""What every token row of a verify batch needs to know about its tree.

A verify batch is one flat token axis. The last ``n`` rows of a request with ``n > 1`` logits are
the root and the first ``n - 1`` nodes of its tree; all other rows (prefill, plain decode, padding)
belong to no tree. Before the target runs, one kernel turns the per-slot trees into per-row arrays
(DDTree, arXiv 2604.12989, tree attention).
"""

from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm_ddtree.round.trees import TreeBuffers


class RowBuffers:
    """Persistent per-row and per-request arrays of the verify batch, rewritten every round.

    positions    int64 [max_num_tokens]     RoPE position; root's position + depth for tree rows
    masks        int32 [max_num_tokens, W]  ancestor bits, own bit included; 0 outside trees
    path         int64 [max_num_tokens]     gather index over rows; the sampler's walk rewrites it
    tail_lens    int32 [max_num_reqs]       tree rows, root included; 0 without a tree
    prefix_lens  int32 [max_num_reqs]       keys before the tree rows; 0 without a tree

    W = ceil((budget + 1) / 32); bit b of word w stands for tree row 32 * w + b.

    Raises ValueError if ``budget`` is not positive.
    """

    def __init__(
        self, max_num_tokens: int, max_num_reqs: int, budget: int, device: torch.device
    ) -> None:
        if budget < 1:
            raise ValueError(f"budget must be at least 1 node, got {budget}")
        self.budget = budget
        self.num_words = triton.cdiv(budget + 1, 32)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.masks = torch.zeros(max_num_tokens, self.num_words, dtype=torch.int32, device=device)
        self.path = torch.arange(max_num_tokens, dtype=torch.int64, device=device)
        self.tail_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.prefix_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)


def prepare_rows(
    trees: "TreeBuffers",
    rows: RowBuffers,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    num_reqs: int,
    num_reqs_padded: int,
    num_tokens_padded: int,
    max_query_len: int,
) -> None:
    """Fill ``rows`` for this batch, in one launch and without a host synchronisation.

    idx_mapping      int64 [>= num_reqs]      slot of each request; -1 (a dummy) means no tree
    query_start_loc  int32 [>= num_reqs + 1]  first row of each request; entry num_reqs: end of all
    cu_num_logits    int32 [>= num_reqs + 1]  running sum of logits; n > 1 of them: n tree rows
    seq_lens         int32 [>= num_reqs]      keys of each request, its own rows included
    positions        int64 [>= real rows]     vLLM's linear positions; may be ``rows.positions``
    max_query_len    rows of the longest request: sizes the grid, does not change the result

    Padded requests get no tail. Rows after the last real one, up to ``num_tokens_padded``, get
    position 0 and mask 0. ``path`` becomes the identity. Requires n <= budget + 1.

    Raises ValueError if the padded batch exceeds the buffers or the trees have another budget.
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
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        seq_lens,
        positions,
        rows.positions,
        rows.masks,
        rows.path,
        rows.tail_lens,
        rows.prefix_lens,
        num_reqs,
        num_reqs_padded,
        num_tokens_padded,
        MAX_TAIL=max_tail,
        NUM_WORDS=rows.num_words,
        BLOCK_WORDS=triton.next_power_of_2(rows.num_words),
        BLOCK=block,
    )


# The counts change every round: specialising on them would compile during serving.
@triton.jit(do_not_specialize=["num_reqs", "num_reqs_padded", "num_tokens_padded"])
def _prepare_rows_kernel(
    depths,  # [S, MAX_TAIL]
    masks,  # [S, MAX_TAIL, NUM_WORDS]
    idx_mapping,  # [num_reqs]
    query_start_loc,  # [num_reqs + 1]
    cu_num_logits,  # [num_reqs + 1]
    seq_lens,  # [num_reqs]
    positions,  # [num_tokens]
    row_positions,  # [max_num_tokens]
    row_masks,  # [max_num_tokens, NUM_WORDS]
    path,  # [max_num_tokens]
    tail_lens,  # [max_num_reqs]
    prefix_lens,  # [max_num_reqs]
    num_reqs,
    num_reqs_padded,
    num_tokens_padded,
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
        start = tl.load(query_start_loc + req)
        end = tl.load(query_start_loc + req + 1)
        slot = tl.load(idx_mapping + req).to(tl.int64)
        num_logits = tl.load(cu_num_logits + req + 1) - tl.load(cu_num_logits + req)
        tail_len = tl.where((num_logits > 1) & (slot >= 0), num_logits, 0)
        if first == 0:
            tl.store(tail_lens + req, tail_len)
            prefix_len = tl.load(seq_lens + req) - tail_len
            tl.store(prefix_lens + req, tl.where(tail_len > 0, prefix_len, 0))
        root = end - tail_len
        # Tree rows read the root's linear position only, and it is rewritten with the same value:
        # the input may be the output.
        root_position = tl.load(positions + root, mask=tail_len > 0, other=0)
        for i in range(start + first, end, step):
            row = i + tl.arange(0, BLOCK)
            in_req = row < end
            in_tree = in_req & (row >= root)
            node = (row - root).to(tl.int64)
            depth = tl.load(depths + slot * MAX_TAIL + node, mask=in_tree, other=0)
            linear = tl.load(positions + row, mask=in_req & (row < root), other=0)
            position = tl.where(in_tree, root_position + depth, linear)
            tl.store(row_positions + row, position, mask=in_req)
            tl.store(path + row, row.to(tl.int64), mask=in_req)
            mask_word = tl.load(
                masks + (slot * MAX_TAIL + node[:, None]) * NUM_WORDS + words[None, :],
                mask=in_tree[:, None] & (words[None, :] < NUM_WORDS),
                other=0,
            )
            tl.store(
                row_masks + row[:, None].to(tl.int64) * NUM_WORDS + words[None, :],
                mask_word,
                mask=in_req[:, None] & (words[None, :] < NUM_WORDS),
            )
    elif req < num_reqs_padded:
        if first == 0:
            tl.store(tail_lens + req, 0)
            tl.store(prefix_lens + req, 0)
    else:
        # Position 0 is always a valid index of the RoPE table.
        num_rows = tl.load(query_start_loc + num_reqs)
        for i in range(num_rows + first, num_tokens_padded, step):
            row = i + tl.arange(0, BLOCK)
            in_padding = row < num_tokens_padded
            tl.store(row_positions + row, tl.zeros([BLOCK], tl.int64), mask=in_padding)
            tl.store(path + row, row.to(tl.int64), mask=in_padding)
            tl.store(
                row_masks + row[:, None].to(tl.int64) * NUM_WORDS + words[None, :],
                tl.zeros([BLOCK, BLOCK_WORDS], tl.int32),
                mask=in_padding[:, None] & (words[None, :] < NUM_WORDS),
            )
