# SPDX-License-Identifier: Apache-2.0
"""Writing a grown tree into its buffers: the end of both builders."""

from vllm.triton_utils import tl, triton


@triton.jit
def store_tree(
    index,  # int64, of the tree
    num_nodes,  # int
    token,  # int [BLOCK], of each node; 0 for other rows
    parent,  # int32 [BLOCK], row of each node's parent
    depth,  # int32 [BLOCK], of each node's parent
    position,  # int32 [BLOCK], place of each row in preorder
    end,  # int32 [BLOCK], place behind the last row below each row
    score,  # float32 [BLOCK], log-prob of the path to each row
    chain_score,  # float32 [32], log-prob of the chain down to each depth
    siblings,  # bool, whether the tree is more than its chain
    draft_ptrs,  # pointers to int64 [BLOCK], where each row's draft token goes
    tokens_ptr,  # int32 [S, N]
    parents_ptr,  # int32 [S, N]
    depths_ptr,  # int32 [S, N]
    masks_ptr,  # int32 [S, N, W]
    num_nodes_ptr,  # int32 [S]
    intervals_ptr,  # int32 [S, 2, N]
    claims_ptr,  # int32 [S, 2, N]
    probabilities_ptr,  # int64 [2, N] or None
    probabilities_stride,
    NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    DEPTH_LIMIT: tl.constexpr,
):
    """Write one tree. Values of rows that are neither the root nor nodes do not matter."""
    row = tl.arange(0, BLOCK)
    level = tl.arange(0, 32)
    in_tree = row < NUM_ROWS
    valid = row <= num_nodes
    is_node = valid & (row > 0)
    tl.store(num_nodes_ptr + index, num_nodes)

    # The score of the root is 0, its claim 1.
    claim = tl.where(valid, (tl.exp(score) * 1048576.0).to(tl.int32), 0)
    chain_claim = (tl.exp(chain_score) * 1048576.0).to(tl.int32)
    chain_claim = tl.where(level <= DEPTH_LIMIT, chain_claim, 0)
    claims_ptr += index * (2 * NUM_ROWS)
    tl.store(claims_ptr + row, claim, mask=in_tree)
    tl.store(claims_ptr + NUM_ROWS + level, chain_claim, mask=level < NUM_ROWS)
    if probabilities_ptr is not None:
        claim = tl.where(siblings, claim, 0).to(tl.int64)
        tl.atomic_add(probabilities_ptr + row, claim, mask=in_tree, sem="relaxed")
        chain_claim = tl.where(siblings, chain_claim, 0).to(tl.int64)
        probabilities_ptr += probabilities_stride
        tl.atomic_add(probabilities_ptr + level, chain_claim, mask=level < NUM_ROWS, sem="relaxed")

    tl.store(draft_ptrs, token.to(tl.int64), mask=in_tree & (row > 0))
    rows = index * NUM_ROWS + row
    tl.store(tokens_ptr + rows, token.to(tl.int32), mask=in_tree)
    tl.store(parents_ptr + rows, tl.where(is_node, parent, -1), mask=in_tree)
    depth = tl.where(is_node, depth + 1, tl.where(row == 0, 0, 1))
    tl.store(depths_ptr + rows, depth, mask=in_tree)

    # Row j is row i or an ancestor when position[j] <= position[i] < end[j]. Unused rows become
    # leaves of the root. Through memory, because row i needs every row j.
    position = tl.where(valid, position, row)
    end = tl.where(valid, end, row + 1)
    end = tl.where(row == 0, BLOCK, end)
    intervals_ptr += index * (2 * NUM_ROWS)
    tl.store(intervals_ptr + row, position, mask=in_tree)
    tl.store(intervals_ptr + NUM_ROWS + row, end, mask=in_tree)
    tl.debug_barrier()
    bit = tl.arange(0, 32)
    for word in tl.static_range(NUM_WORDS):
        other = word * 32 + bit
        starts = tl.load(intervals_ptr + other, mask=other < NUM_ROWS, other=BLOCK)
        ends = tl.load(intervals_ptr + NUM_ROWS + other, mask=other < NUM_ROWS, other=0)
        # [32, BLOCK]: lanes run along the rows, so the sum over 32 stays in one thread.
        is_ancestor = (starts[:, None] <= position[None, :]) & (position[None, :] < ends[:, None])
        bits = tl.sum(tl.where(is_ancestor, 1 << bit[:, None], 0), axis=0)
        tl.store(masks_ptr + rows * NUM_WORDS + word, bits.to(tl.int32), mask=in_tree)
