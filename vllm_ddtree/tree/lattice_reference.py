# SPDX-License-Identifier: Apache-2.0
"""The lattice tree on paper: best-first growth where a token's log-prob depends on its parent's.

A conditional drafter gives one table a depth: S[d, p, c] is the log-prob of candidate c of depth d
after candidate p of the depth before. A tree over such a lattice grows like any other (DDTree,
arXiv 2604.12989). Only the order of a node's children is its own: they are ranked by the row of the
node's candidate, not by one row for the whole depth.

The oracle for :mod:`vllm_ddtree.tree.lattice`, which must agree with it bit for bit.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from vllm_ddtree.tree.reference import Tree


def ranked(log_probs: NDArray[np.float32]) -> NDArray[np.intp]:
    """Candidates of each row, best first; equal ones in candidate order, missing ones last.

    Args:
        log_probs: float32 [..., K], a missing candidate is -inf or NaN.

    Returns:
        int [..., K].

    """
    present = np.where(log_probs > -np.inf, log_probs, -np.inf)  # false for NaN too
    return np.argsort(-present, axis=-1, kind="stable")


def build_lattice_tree(
    log_probs: NDArray[np.float32],
    token_ids: NDArray[np.integer],
    budget: int,
    depth_limit: int | None = None,
    chain: bool = False,
) -> Tree:
    """Grow the tree of the `budget` most probable continuations of a lattice.

    Pop the node with the highest sum of log-probs along its path. Then push its next sibling, which
    is the next best candidate after the same parent, and its first child, which is the best
    candidate after itself. Stop at `budget` nodes, or when nothing is left. Of equal scores the
    lexicographically smaller tuple of ranks is popped first, a prefix before its extensions; a rank
    is a place in the parent's row. A candidate whose log-prob is -inf or NaN does not exist, and
    neither does one whose score overflows to -inf.

    Args:
        log_probs: float32 [D, K, K], candidate c of depth d + 1 after candidate p of depth d at
            [d, p, c], natural logarithm. Row [0, 0] follows the root; [0, 1:] is not read.
        token_ids: int [D, K], the candidates' tokens.
        budget: most nodes, without the root.
        depth_limit: deepest node, at most D (None: D).
        chain: only the best candidate of each row.

    Returns:
        The tree. Its `ranks` are places in the parent's row.

    Raises:
        ValueError: the shapes do not fit.

    """
    num_depths, top_k = token_ids.shape
    if log_probs.shape != (num_depths, top_k, top_k):
        raise ValueError(
            f"log_probs {log_probs.shape} must be [D, K, K] for token_ids {token_ids.shape}"
        )
    log_probs = log_probs.astype(np.float32)
    order = ranked(log_probs)
    if depth_limit is not None:
        num_depths = min(num_depths, depth_limit)

    tokens, parents, depths, ranks, scores = [0], [-1], [0], [-1], [np.float32(0)]
    chosen = [0]  # candidate of each row; the root stands in row [0, 0]
    heap: list[tuple[float, tuple[int, ...], int]] = []  # (-score, rank tuple, parent row)

    def push(parent: int, path: tuple[int, ...]) -> None:
        depth, rank = len(path), path[-1]
        if depth > num_depths or rank >= top_k or (chain and rank > 0):
            return
        row = log_probs[depth - 1, chosen[parent]]
        score = np.float32(scores[parent] + row[order[depth - 1, chosen[parent], rank]])
        if score > -np.inf:  # false for NaN too
            heapq.heappush(heap, (-float(score), path, parent))

    with np.errstate(over="ignore", invalid="ignore"):
        push(0, (0,))
        while heap and len(tokens) <= budget:
            score, path, parent = heapq.heappop(heap)
            depth, rank = len(path), path[-1]
            candidate = int(order[depth - 1, chosen[parent], rank])
            new = len(tokens)
            tokens.append(int(token_ids[depth - 1, candidate]))
            parents.append(parent)
            depths.append(depth)
            ranks.append(rank)
            scores.append(np.float32(-score))
            chosen.append(candidate)
            push(parent, (*path[:-1], rank + 1))
            push(new, (*path, 0))

    masks = np.eye(len(tokens), dtype=np.bool_)
    for row in range(1, len(tokens)):
        masks[row] |= masks[parents[row]]
    return Tree(
        np.array(tokens, np.int64),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.array(ranks, np.int32),
        np.array(scores, np.float32),
        masks,
    )


def lattice_chain(
    log_probs: NDArray[np.float32],
    token_ids: NDArray[np.integer],
    depth_limit: int | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Walk down the best candidate of each row.

    Args:
        log_probs: float32 [D, K, K], as in `build_lattice_tree`.
        token_ids: int [D, K].
        depth_limit: deepest node, at most D (None: D).

    Returns:
        tokens int64 [depth], and float64 [depth]: log-probs of the path down to each of them. A row
        without candidates goes on with its first one, at -inf.

    """
    order = ranked(log_probs)
    num_depths = min(len(token_ids), depth_limit or len(token_ids))
    tokens, scores = [], []
    previous, score = 0, 0.0
    for depth in range(num_depths):
        candidate = int(order[depth, previous, 0])
        log_prob = float(log_probs[depth, previous, candidate])
        score += log_prob if log_prob > -np.inf else -np.inf
        tokens.append(int(token_ids[depth, candidate]))
        scores.append(score)
        previous = candidate
    return np.array(tokens, np.int64), np.array(scores)
