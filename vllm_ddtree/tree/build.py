# SPDX-License-Identifier: Apache-2.0
"""Growing the trees on the device, one program a request (DDTree, arXiv 2604.12989).

Siblings are taken in order of rank, so each row has exactly one pending candidate: its next child.
One lane holds one row with that candidate, and the heap of the paper becomes two max-reductions
over lanes.

Ties go to the lexicographically smaller tuple of ranks, which needs no stored paths. Number the
rows in preorder (children by rank): that is the lexicographic order. The candidate of row p belongs
right behind p's subtree, at `end(p)`. Of two candidates with different ends a row lies between
them, so the smaller end is the smaller tuple; with equal ends one owner is an ancestor of the
other, and the deeper owner's candidate extends an earlier child of the shallower one, so it is
smaller. Hence the key (end ascending, depth descending), unique among rows. A new row moves every
end behind it by one, which are exactly the keys that do not beat the winner's.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.round.trees import TreeBuffers
from vllm_ddtree.tree.checks import check_build
from vllm_ddtree.tree.store import store_tree


def build_trees(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    indices: torch.Tensor,
    trees: TreeBuffers,
    draft_tokens: torch.Tensor,
    depth_limit: int,
    probabilities: torch.Tensor | None = None,
) -> None:
    """Grow one tree per batch row into `trees`, equal to `reference.build_tree`.

    Reads and writes only device memory and allocates nothing, so it can be captured in a graph.

    Args:
        log_probs: float32 [R, D, K], D <= 31, K <= 64, best candidate first; contiguous in the last
            dimension.
        token_ids: int32 or int64 [R, D, K], contiguous in the last dimension.
        indices: int32 or int64 [R], index in `trees` of each batch row, all different; a row of -1
            has no tree.
        trees: written at `indices`; `chain_only` is read.
        draft_tokens: int64 [R, budget], out: token of node i at [r, i - 1]; 0 for unused rows and
            for batch rows without a tree.
        depth_limit: deepest node, 1 to D.
        probabilities: int64 [2, N], in/out (`Meter.built`): 2^20 times the path probability of each
            row of the tree, and of each depth of its chain, is added. A request that verifies its
            chain alone adds nothing.

    Raises:
        ValueError: a shape, dtype or limit does not fit.

    """
    if log_probs.dim() != 3 or log_probs.dtype != torch.float32:
        raise ValueError(
            f"log_probs must be float32 [R, D, K], got {log_probs.dtype} {list(log_probs.shape)}"
        )
    check_build(log_probs, token_ids, indices, trees, draft_tokens, depth_limit)
    num_reqs = log_probs.shape[0]
    if num_reqs == 0:
        return
    _build_trees_kernel[(num_reqs,)](
        log_probs,
        log_probs.stride(0),
        log_probs.stride(1),
        token_ids,
        token_ids.stride(0),
        token_ids.stride(1),
        indices,
        draft_tokens,
        draft_tokens.stride(0),
        trees.tokens,
        trees.parents,
        trees.depths,
        trees.masks,
        trees.num_nodes,
        trees.chain_only,
        trees.intervals,
        trees.chains,
        trees.claims,
        probabilities,
        0 if probabilities is None else probabilities.stride(0),
        NUM_ROWS=trees.num_rows,
        BLOCK=max(32, triton.next_power_of_2(trees.num_rows)),
        NUM_WORDS=trees.num_words,
        DEPTH_LIMIT=depth_limit,
        TOP_K=log_probs.shape[2],
        num_warps=1,  # a reduction inside one warp needs no barrier
    )


@triton.jit
def _build_trees_kernel(
    log_probs_ptr,  # float32 [R, D, K]
    log_probs_stride_r,
    log_probs_stride_d,
    token_ids_ptr,  # int [R, D, K]
    token_ids_stride_r,
    token_ids_stride_d,
    indices_ptr,  # int [R]
    draft_tokens_ptr,  # int64 [R, budget]
    draft_tokens_stride_r,
    tokens_ptr,  # int32 [S, N]
    parents_ptr,  # int32 [S, N]
    depths_ptr,  # int32 [S, N]
    masks_ptr,  # int32 [S, N, W]
    num_nodes_ptr,  # int32 [S]
    chain_only_ptr,  # int32 [S]
    intervals_ptr,  # int32 [S, 2, N]
    chains_ptr,  # int32 [S, 31]
    claims_ptr,  # int32 [S, 2, N]
    probabilities_ptr,  # int64 [2, N] or None
    probabilities_stride,
    NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    DEPTH_LIMIT: tl.constexpr,
    TOP_K: tl.constexpr,
):
    # Key of a row's candidate, larger is earlier: 511 - end (9 bits), depth of the row (5), row
    # (8), rank (6). A rank that runs over (64) spoils the row field, but such a candidate does not
    # exist and never wins.
    END_AT: tl.constexpr = 19
    DEPTH_AT: tl.constexpr = 14
    ROW_AT: tl.constexpr = 6
    END: tl.constexpr = 1 << 19
    DEPTH: tl.constexpr = 1 << 14
    ROW: tl.constexpr = 1 << 6
    NONE: tl.constexpr = -2139095041  # the image of -inf: no candidate

    batch_row = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    in_tree = row < NUM_ROWS
    draft_ptrs = draft_tokens_ptr + batch_row * draft_tokens_stride_r + row - 1
    index = tl.load(indices_ptr + batch_row).to(tl.int64)
    if index < 0:
        tl.store(draft_ptrs, tl.zeros([BLOCK], tl.int64), mask=in_tree & (row > 0))
        return

    log_probs_ptr += batch_row * log_probs_stride_r
    stride_d = tl.cast(log_probs_stride_d, tl.int64)
    siblings = tl.load(chain_only_ptr + index) == 0

    # Scores are compared as int32 of the same order: negative floats have all bits but the sign
    # flipped. The root's candidate is the first token. 0.0 + x is never -0.0, and neither is any
    # later sum.
    first = 0.0 + tl.load(log_probs_ptr)
    first = tl.where(first > float("-inf"), first, float("-inf"))
    first_bits = first.to(tl.int32, bitcast=True)
    pending = tl.where(row == 0, first_bits ^ ((first_bits >> 31) & 0x7FFFFFFF), NONE)
    key = tl.where(row == 0, 510 * END, 0)
    cumulative = tl.zeros([BLOCK], tl.float32)
    position = tl.zeros([BLOCK], tl.int32)  # preorder number
    won = tl.zeros([BLOCK], tl.int32)  # the key with which the row was popped

    new = 1
    top = tl.max(pending, axis=0)
    while (new < NUM_ROWS) & (top > NONE):
        best = tl.max(tl.where(pending == top, key, -1), axis=0)
        depth = (best >> DEPTH_AT) & 31
        next_rank = (best & 63) + 1
        candidates = log_probs_ptr + depth * stride_d
        next_sibling = tl.load(
            candidates + next_rank, mask=siblings & (next_rank < TOP_K), other=float("-inf")
        )
        first_child = tl.load(
            candidates + stride_d, mask=depth < DEPTH_LIMIT - 1, other=float("-inf")
        )
        is_parent = key == best
        is_new = row == new
        bits = top ^ ((top >> 31) & 0x7FFFFFFF)
        cumulative = tl.where(is_new, bits.to(tl.float32, bitcast=True), cumulative)
        score = cumulative + tl.where(is_new, first_child, next_sibling)
        score = tl.where(score > float("-inf"), score, float("-inf"))  # NaN goes too
        bits = score.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        pending = tl.where(is_parent | is_new, bits, pending)
        # The new row ends one behind its own place and is one deeper than its parent.
        new_key = (best & -DEPTH) + (DEPTH - END + new * ROW)
        key = tl.where(key <= best, key - END, key)
        key = tl.where(is_new, new_key, tl.where(is_parent, key + 1, key))
        end = 511 - (best >> END_AT)
        position = tl.where(is_new, end, tl.where(position >= end, position + 1, position))
        won = tl.where(is_new, best, won)
        top = tl.max(pending, axis=0)
        new += 1

    level = tl.arange(0, 32)
    chain = tl.load(
        token_ids_ptr + batch_row * token_ids_stride_r + level.to(tl.int64) * token_ids_stride_d,
        mask=level < DEPTH_LIMIT,
        other=0,
    )
    tl.store(chains_ptr + index * 31 + level, chain.to(tl.int32), mask=level < DEPTH_LIMIT)

    num_nodes = new - 1
    best = tl.load(
        log_probs_ptr + (level - 1).to(tl.int64) * stride_d,
        mask=(level > 0) & (level <= DEPTH_LIMIT),
        other=0.0,
    )
    best = tl.where(best > float("-inf"), best, float("-inf"))  # NaN goes too
    depth = (won >> DEPTH_AT) & 31
    token = tl.load(
        token_ids_ptr
        + batch_row * token_ids_stride_r
        + depth.to(tl.int64) * token_ids_stride_d
        + (won & 63),
        mask=(row > 0) & (row <= num_nodes),
        other=0,
    )
    store_tree(
        index,
        num_nodes,
        token,
        (won >> ROW_AT) & 255,
        depth,
        position,
        511 - (key >> END_AT),
        cumulative,
        tl.cumsum(best, axis=0),
        siblings,
        draft_ptrs,
        tokens_ptr,
        parents_ptr,
        depths_ptr,
        masks_ptr,
        num_nodes_ptr,
        intervals_ptr,
        claims_ptr,
        probabilities_ptr,
        probabilities_stride,
        NUM_ROWS=NUM_ROWS,
        BLOCK=BLOCK,
        NUM_WORDS=NUM_WORDS,
        DEPTH_LIMIT=DEPTH_LIMIT,
    )
