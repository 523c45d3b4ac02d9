# SPDX-License-Identifier: Apache-2.0
"""The tree on paper: best-first growth with a heap, and the walk (DDTree, arXiv 2604.12989).

The oracle for :mod:`vllm_ddtree.tree.build`, which must agree with it bit for bit.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tree:
    """A draft tree of `n` nodes under a root. Row 0 is the root, row `i` the i-th node popped."""

    tokens: NDArray[np.int64]
    """int64 [n + 1], token of each row; 0 for the root, whose token is not the tree's to say."""
    parents: NDArray[np.int32]
    """int32 [n + 1], row of the parent, smaller than the row itself; -1 for the root."""
    depths: NDArray[np.int32]
    """int32 [n + 1], distance from the root."""
    ranks: NDArray[np.int32]
    """int32 [n + 1], place of the token among its position's candidates, 0 is the most probable; -1
    for the root."""
    scores: NDArray[np.float32]
    """float32 [n + 1], sum of the path's log-probs; 0 for the root."""
    masks: NDArray[np.bool_]
    """bool [n + 1, n + 1], masks[i, j] when row j is row i itself or one of its ancestors."""

    @property
    def num_nodes(self) -> int:
        """Nodes without the root."""
        return len(self.parents) - 1


def build_tree(
    log_probs: NDArray[np.float32],
    token_ids: NDArray[np.integer],
    budget: int,
    depth_limit: int | None = None,
    chain: bool = False,
) -> Tree:
    """Grow the tree of the `budget` most probable continuations (DDTree, arXiv 2604.12989).

    Pop the candidate with the highest cumulative log-prob, then push its next sibling (same parent,
    next rank) and its first child (next depth, rank 0), until there are `budget` nodes or nothing
    is left. Of equal scores the lexicographically smaller tuple of ranks is popped first, a prefix
    before its extensions. A candidate whose score is not above -inf (a log-prob of -inf or NaN)
    does not exist, and neither do its later siblings.

    Args:
        log_probs: float32 [D, K], candidates of each draft position, natural logarithm, best first.
        token_ids: int [D, K], their tokens.
        budget: most nodes, without the root.
        depth_limit: deepest node, at most D; None: D.
        chain: whether to grow the chain alone, rank 0 at every depth.

    Raises:
        ValueError: the shapes differ.

    """
    if log_probs.ndim != 2 or log_probs.shape != token_ids.shape:
        raise ValueError(
            f"log_probs {log_probs.shape} and token_ids {token_ids.shape} "
            "must have the same shape [D, K]"
        )
    num_depths, top_k = log_probs.shape
    if depth_limit is not None:
        num_depths = min(num_depths, depth_limit)
    log_probs = log_probs.astype(np.float32)

    tokens, parents, depths, ranks, scores = [0], [-1], [0], [-1], [np.float32(0)]
    heap: list[tuple[float, tuple[int, ...], int]] = []  # (-score, rank tuple, parent row)

    def push(parent: int, path: tuple[int, ...]) -> None:
        depth, rank = len(path), path[-1]
        if depth > num_depths or rank >= top_k or (chain and rank > 0):
            return
        score = np.float32(scores[parent] + log_probs[depth - 1, rank])
        if score > -np.inf:  # false for NaN too
            heapq.heappush(heap, (-float(score), path, parent))

    with np.errstate(over="ignore", invalid="ignore"):
        push(0, (0,))
        while heap and len(tokens) <= budget:
            score, path, parent = heapq.heappop(heap)
            row = len(tokens)
            tokens.append(int(token_ids[len(path) - 1, path[-1]]))
            parents.append(parent)
            depths.append(len(path))
            ranks.append(path[-1])
            scores.append(np.float32(-score))
            push(parent, (*path[:-1], path[-1] + 1))
            push(row, (*path, 0))

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


def accepted_path(tree: Tree, choices: NDArray[np.integer]) -> tuple[list[int], int]:
    """Follow the target's own choices from the root while they are in the tree.

    Args:
        tree: a draft tree.
        choices: int [n + 1], the token that the target chose after each row.

    Returns:
        The rows of the accepted nodes in path order (without the root; empty if no child matches),
        and the bonus token: the first choice that is not a child.

    """
    rows: list[int] = []
    row = 0
    while True:
        children = np.flatnonzero((tree.parents == row) & (tree.tokens == choices[row]))
        if len(children) == 0:
            return rows, int(choices[row])
        row = int(children[0])
        rows.append(row)
