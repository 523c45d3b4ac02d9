# SPDX-License-Identifier: Apache-2.0
"""Growing trees over lattices on the device: the drafter knows each token's predecessor.

A lattice S[d, p, c] holds the log-prob of candidate c of depth d after candidate p of the depth
before. A row of the tree still has exactly one pending candidate, its next child by rank, so the
growth is that of `build.py`: lanes for the heap, a key for ties. What is new is that a row's
ranking belongs to its own candidate.

The rankings are made beforehand by a kernel of its own, all D * K of them side by side: a rank is a
count of better candidates, so nothing in it waits for anything. What is left to the serial loop is
two loads a pop. The next sibling lies one rank further in the same ranking, the first child at rank
0 of the ranking of the popped candidate. Both addresses follow from one number that the popped lane
carries, so the loads wait for a third reduction and for nothing else. Ranking on demand, with a
reduction over K for either load, would put two more reductions into each pop.

The rankings are stored rank by rank: [K ranks, D, K]. A tree looks at few ranks of many rows, and
what it looks at lies in few cache lines.

Ties and the masks are those of `build.py`, whose argument needs only that siblings come in order of
rank.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.round.trees import MAX_DEPTH, TreeBuffers
from vllm_ddtree.tree.checks import MAX_TOP_K, check_build
from vllm_ddtree.tree.store import store_tree

RANKED_ROWS = 8
"""Rankings of one program, at K = 16. Larger K take fewer: the work is quadratic."""
TOUCHED = 1024
"""Most entries that the builder reads ahead, all at once: the first ranks of every row. Each is
needed soon, and the loop would wait for them one by one."""


class Rankings:
    """Persistent scratch of `build_lattice_trees`, so that a call allocates nothing.

    Args:
        max_num_reqs: most requests in one call.
        depth: deepest node, 1 to 31.
        top_k: candidates a depth, 1 to 64.
        device: where the lattices are.

    Raises:
        ValueError: a size does not fit.

    """

    def __init__(
        self, max_num_reqs: int, depth: int, top_k: int, device: torch.device | str
    ) -> None:
        if max_num_reqs < 1:
            raise ValueError(f"max_num_reqs must be at least 1, got {max_num_reqs}")
        if not (1 <= depth <= MAX_DEPTH and 1 <= top_k <= MAX_TOP_K):
            raise ValueError(
                f"depth is {depth} and top_k {top_k}; "
                f"pass 1 <= depth <= {MAX_DEPTH} and 1 <= top_k <= {MAX_TOP_K}"
            )
        self.max_num_reqs = max_num_reqs
        self.depth = depth
        self.top_k = top_k
        self.entries = torch.zeros(
            max_num_reqs, top_k * depth * top_k, dtype=torch.int64, device=device
        )
        """int64 [R, K * D * K], candidate of rank r after candidate p at depth d + 1 in place
        (r * D + d) * K + p, D the depth limit of the call: its log-prob's bits, then its number, 32
        bits each."""
        # On the CPU Triton's interpreter pays by the operation: there one program takes many rows.
        comparisons = 2**20 if torch.device(device).type == "cpu" else RANKED_ROWS * 16**2
        rows = max(1, comparisons // triton.next_power_of_2(top_k) ** 2)
        self.rows_per_program = min(rows, triton.next_power_of_2(depth * top_k))


def build_lattice_trees(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    indices: torch.Tensor,
    trees: TreeBuffers,
    draft_tokens: torch.Tensor,
    depth_limit: int,
    rankings: Rankings,
    probabilities: torch.Tensor | None = None,
) -> None:
    """Grow one tree per batch row into `trees`, equal to `build_lattice_tree` of the reference.

    Reads and writes only device memory and allocates nothing, so it can be captured in a graph. The
    chain is the walk down the best candidate of each row, whatever the request verifies.

    Args:
        log_probs: float32 [R, D, K, K], D <= 31, K <= 64: candidate c of depth d + 1 after
            candidate p of depth d at [r, d, p, c]; contiguous in the last dimension. The root's row
            is [r, 0, 0]; [r, 0, 1:] does not matter. -inf and NaN are no candidates.
        token_ids: int32 or int64 [R, D, K], contiguous in the last dimension.
        indices: int32 or int64 [R], index in `trees` of each batch row, all different; a row of -1
            has no tree.
        trees: written at `indices`; the chain-only flag is read.
        draft_tokens: int64 [R, budget], out: token of node i at [r, i - 1]; 0 for unused rows and
            for batch rows without a tree.
        depth_limit: deepest node, 1 to D.
        rankings: scratch, made for at least R requests and this depth limit, and for this K.
        probabilities: int64 [2, N], in/out: 2^20 times the path probability of each row of the
            tree, and of each depth of its chain, is added (round/meter.py). A request that verifies
            its chain alone adds nothing.

    Raises:
        ValueError: a shape, dtype or limit does not fit.

    """
    _check(log_probs, token_ids, indices, trees, draft_tokens, depth_limit, rankings)
    num_reqs, _, _, top_k = log_probs.shape
    if num_reqs == 0:
        return
    num_rankings = depth_limit * top_k
    rows = rankings.rows_per_program
    _rank_kernel[(num_reqs, triton.cdiv(num_rankings, rows))](
        log_probs,
        log_probs.stride(0),
        log_probs.stride(1),
        log_probs.stride(2),
        indices,
        rankings.entries,
        rankings.entries.stride(0),
        NUM_RANKINGS=num_rankings,
        TOP_K=top_k,
        ROWS=rows,
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=2,
    )
    _build_lattice_trees_kernel[(num_reqs,)](
        rankings.entries,
        rankings.entries.stride(0),
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
        TOP_K=top_k,
        TOUCHED=min(TOUCHED, triton.next_power_of_2(2 * num_rankings)),
        num_warps=1,  # a reduction inside one warp needs no barrier
    )


def _check(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    indices: torch.Tensor,
    trees: TreeBuffers,
    draft_tokens: torch.Tensor,
    depth_limit: int,
    rankings: Rankings,
) -> None:
    """Host-side checks of shapes, dtypes and limits; contents are not looked at."""
    if log_probs.dim() != 4 or log_probs.dtype != torch.float32:
        raise ValueError(
            f"log_probs must be float32 [R, D, K, K], got {log_probs.dtype} {list(log_probs.shape)}"
        )
    num_reqs, _, _, top_k = log_probs.shape
    if log_probs.shape[2] != top_k:
        raise ValueError(
            f"log_probs must be [R, D, K, K], got {list(log_probs.shape)}: "
            "as many candidates before as after"
        )
    check_build(log_probs, token_ids, indices, trees, draft_tokens, depth_limit)
    room = (rankings.max_num_reqs, rankings.depth, rankings.top_k)
    if num_reqs > room[0] or depth_limit > room[1] or top_k != room[2]:
        raise ValueError(
            f"rankings has room for {room[0]} requests and depth {room[1]} of {room[2]} "
            f"candidates, not for {num_reqs} requests and depth {depth_limit} of {top_k}"
        )


@triton.jit
def _rank_kernel(
    log_probs_ptr,  # float32 [R, D, K, K]
    log_probs_stride_r,
    log_probs_stride_d,
    log_probs_stride_p,
    indices_ptr,  # int [R]
    entries_ptr,  # int64 [R, K * D * K]
    entries_stride,
    NUM_RANKINGS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    batch_row = tl.program_id(0).to(tl.int64)
    if tl.load(indices_ptr + batch_row) < 0:
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    offsets = (row // TOP_K).to(tl.int64) * log_probs_stride_d + (row % TOP_K) * log_probs_stride_p
    offsets = (offsets + batch_row * log_probs_stride_r)[:, None, None]
    in_lattice = (row < NUM_RANKINGS)[:, None, None]
    mine = tl.arange(0, BLOCK_K)[None, :, None]
    other = tl.arange(0, BLOCK_K)[None, None, :]
    # Twice, so that neither changes its layout. The second comes from the cache.
    here = in_lattice & (mine < TOP_K)
    x = tl.load(log_probs_ptr + offsets + mine, mask=here, other=float("-inf"))
    y = tl.load(
        log_probs_ptr + offsets + other, mask=in_lattice & (other < TOP_K), other=float("-inf")
    )
    x = tl.where(x > float("-inf"), x, float("-inf"))  # NaN goes too
    y = tl.where(y > float("-inf"), y, float("-inf"))
    before = (y > x) | ((y == x) & (other < mine))
    rank = tl.sum(before.to(tl.int32), axis=2, keep_dims=True)  # [ROWS, BLOCK_K, 1]
    entry = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | mine
    place = rank * NUM_RANKINGS + row[:, None, None]
    tl.store(entries_ptr + batch_row * entries_stride + place, entry, mask=here)


@triton.jit
def _value_of(entry):
    """The log-prob of an entry of the rankings."""
    return (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _candidate_of(entry):
    """The candidate of an entry of the rankings."""
    return entry.to(tl.int32)


@triton.jit
def _build_lattice_trees_kernel(
    entries_ptr,  # int64 [R, K * D * K]
    entries_stride,
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
    TOUCHED: tl.constexpr,
):
    # Key of a row's candidate, larger is earlier: 511 - end (9 bits), depth of the row (5), row
    # (8). `where` of a row's candidate: its place in the rankings (17 bits), its number (6).
    END_AT: tl.constexpr = 13
    DEPTH_AT: tl.constexpr = 8
    END: tl.constexpr = 1 << 13
    DEPTH: tl.constexpr = 1 << 8
    CANDIDATE_BITS: tl.constexpr = 6
    RANK: tl.constexpr = DEPTH_LIMIT * TOP_K  # from a place to that of the next rank
    SIZE: tl.constexpr = TOP_K * DEPTH_LIMIT * TOP_K
    MISSING: tl.constexpr = -36028797018963968  # an entry of -inf
    NONE: tl.constexpr = -2139095041  # the image of -inf: no candidate

    batch_row = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    in_tree = row < NUM_ROWS
    draft_ptrs = draft_tokens_ptr + batch_row * draft_tokens_stride_r + row - 1
    index = tl.load(indices_ptr + batch_row).to(tl.int64)
    if index < 0:
        tl.store(draft_ptrs, tl.zeros([BLOCK], tl.int64), mask=in_tree & (row > 0))
        return

    entries_ptr += batch_row * entries_stride
    siblings = tl.load(chain_only_ptr + index) == 0

    # Scores are compared as int32 of the same order: negative floats have all bits but the sign
    # flipped. 0.0 + x is never -0.0, and neither is any later sum.
    first = tl.load(entries_ptr)
    first_score = 0.0 + _value_of(first)
    first_bits = first_score.to(tl.int32, bitcast=True)
    pending = tl.where(row == 0, first_bits ^ ((first_bits >> 31) & 0x7FFFFFFF), NONE)
    key = tl.where(row == 0, 510 * END, 0)
    where = tl.where(row == 0, _candidate_of(first), 0)
    cumulative = tl.zeros([BLOCK], tl.float32)
    position = tl.zeros([BLOCK], tl.int32)  # preorder number
    won = tl.zeros([BLOCK], tl.int32)  # the key with which the row was popped
    chosen = tl.zeros([BLOCK], tl.int32)  # the row's candidate

    new = 1
    top = tl.max(pending, axis=0)
    # Bring the first ranks of all rows near. No entry has the bits of NaN, so nothing changes.
    ahead = tl.arange(0, TOUCHED)
    ahead = tl.max(tl.load(entries_ptr + ahead, mask=ahead < SIZE, other=0), axis=0)
    top = tl.where((ahead >> 32) == 0x7FFFFFFF, NONE, top)
    while (new < NUM_ROWS) & (top > NONE):
        best = tl.max(tl.where(pending == top, key, -1), axis=0)
        is_parent = key == best
        taken = tl.max(tl.where(is_parent, where, -1), axis=0)
        depth = (best >> DEPTH_AT) & 31
        candidate = taken & ((1 << CANDIDATE_BITS) - 1)
        sibling_at = (taken >> CANDIDATE_BITS) + RANK
        child_at = (depth + 1) * TOP_K + candidate
        sibling = tl.load(
            entries_ptr + sibling_at, mask=siblings & (sibling_at < SIZE), other=MISSING
        )
        child = tl.load(entries_ptr + child_at, mask=depth < DEPTH_LIMIT - 1, other=MISSING)
        is_new = row == new
        bits = top ^ ((top >> 31) & 0x7FFFFFFF)
        cumulative = tl.where(is_new, bits.to(tl.float32, bitcast=True), cumulative)
        score = cumulative + tl.where(is_new, _value_of(child), _value_of(sibling))
        score = tl.where(score > float("-inf"), score, float("-inf"))  # NaN goes too
        bits = score.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        pending = tl.where(is_parent | is_new, bits, pending)
        child_at = (child_at << CANDIDATE_BITS) | _candidate_of(child)
        sibling_at = (sibling_at << CANDIDATE_BITS) | _candidate_of(sibling)
        where = tl.where(is_new, child_at, tl.where(is_parent, sibling_at, where))
        # The new row ends one behind its own place and is one deeper than its parent.
        new_key = (best & -DEPTH) + (DEPTH - END + new)
        key = tl.where(key <= best, key - END, key)
        key = tl.where(is_new, new_key, key)
        end = 511 - (best >> END_AT)
        position = tl.where(is_new, end, tl.where(position >= end, position + 1, position))
        won = tl.where(is_new, best, won)
        chosen = tl.where(is_new, candidate, chosen)
        top = tl.max(pending, axis=0)
        new += 1

    # The chain: down the first ranks, whose place is depth * TOP_K + candidate before.
    level = tl.arange(0, 32)
    chain = tl.zeros([32], tl.int32)
    chain_scores = tl.zeros([32], tl.float32)
    previous = 0
    total = 0.0
    for step in range(DEPTH_LIMIT):
        entry = tl.load(entries_ptr + step * TOP_K + previous)
        previous = _candidate_of(entry)
        total += _value_of(entry)
        chain = tl.where(level == step, previous, chain)
        chain_scores = tl.where(level == step + 1, total, chain_scores)
    token_ids_ptr += batch_row * token_ids_stride_r
    chain_tokens = tl.load(
        token_ids_ptr + level.to(tl.int64) * token_ids_stride_d + chain,
        mask=level < DEPTH_LIMIT,
        other=0,
    )
    tl.store(chains_ptr + index * 31 + level, chain_tokens.to(tl.int32), mask=level < DEPTH_LIMIT)

    num_nodes = new - 1
    depth = (won >> DEPTH_AT) & 31
    token = tl.load(
        token_ids_ptr + depth.to(tl.int64) * token_ids_stride_d + chosen,
        mask=(row > 0) & (row <= num_nodes),
        other=0,
    )
    store_tree(
        index,
        num_nodes,
        token,
        won & 255,
        depth,
        position,
        511 - (key >> END_AT),
        cumulative,
        chain_scores,
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
