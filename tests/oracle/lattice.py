# SPDX-License-Identifier: Apache-2.0
"""The lattice oracle: the tree of a conditional draft, by listing paths. No heap, no kernel.

For log-probs of at most 0 the best-first tree is a sorted list. No continuation beats what it
continues and no later sibling an earlier one, so the first n of all paths by (score descending,
ranks ascending) are closed under parents, and they are the tree.

    log_probs = conditional(scores, unary)
    tree = tree_of(best_paths(log_probs, budget=31, depth_limit=7), token_ids)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ddtree.tree.reference import Tree


@dataclass(frozen=True)
class Path:
    """A path from the root.

    Attributes:
        ranks: place of each step's candidate in the row of the step before.
        candidates: the candidates themselves.
        score: sum of log-probs, added from the root on in float32.
    """

    ranks: tuple[int, ...]
    candidates: tuple[int, ...]
    score: float


def conditional(scores: NDArray, unary: NDArray) -> NDArray[np.float64]:
    """Log-probs of a lattice of raw scores.

    log P(c | p) = log softmax over c of scores[d, p, c] + log of the sum over c of exp unary[d, c].

    Args:
        scores: float [D, K, K], as a candidate head gives them.
        unary: float [D, K], log-probs of the candidates over the whole vocabulary. A candidate of
            -inf or NaN is none.

    Returns:
        float64 [D, K, K], -inf where there is no candidate.

    """
    out = np.full(scores.shape, -np.inf)
    for depth, before in np.ndindex(scores.shape[:2]):
        row, own = scores[depth, before].astype(float), unary[depth].astype(float)
        there = (row > -np.inf) & (own > -np.inf)
        if there.any():
            weights = np.exp(row[there] - row[there].max())
            mass = np.exp(own[own > -np.inf]).sum()
            out[depth, before, there] = np.log(weights / weights.sum() * mass)
    return out


def _paths(log_probs: NDArray[np.float32], depth_limit: int) -> Iterator[Path]:
    """Every path of existing candidates."""
    top_k = log_probs.shape[-1]

    def row_of(depth: int, before: int) -> list[int]:
        """Candidates, best first."""
        row = [float(x) for x in log_probs[depth, before]]
        present = [c for c in range(top_k) if row[c] > -np.inf]
        return sorted(present, key=lambda c: (-row[c], c))

    for length in range(1, depth_limit + 1):
        for candidates in itertools.product(range(top_k), repeat=length):
            score, before, ranks = np.float32(0), 0, []
            for depth, candidate in enumerate(candidates):
                row = row_of(depth, before)
                if candidate not in row:
                    break
                ranks.append(row.index(candidate))
                with np.errstate(over="ignore"):
                    score = np.float32(score + log_probs[depth, before, candidate])
                before = candidate
            if len(ranks) == length and score > -np.inf:
                yield Path(tuple(ranks), candidates, float(score))


def best_paths(log_probs: NDArray[np.float32], budget: int, depth_limit: int) -> list[Path]:
    """The `budget` best paths, a parent before its children.

    Args:
        log_probs: float32 [D, K, K], at most 0; -inf and NaN are no candidates.
        budget: most paths.
        depth_limit: longest path.

    """
    paths = sorted(_paths(log_probs, depth_limit), key=lambda path: (-path.score, path.ranks))
    return paths[:budget]


def greedy_path(log_probs: NDArray[np.float32]) -> list[int]:
    """Candidates of the chain: at each depth the best one after the one before.

    Args:
        log_probs: float32 [D, K, K], every candidate there.

    """
    path = [0]
    for table in log_probs:
        path.append(int(table[path[-1]].argmax()))
    return path[1:]


def tree_of(paths: Sequence[Path], token_ids: NDArray[np.integer]) -> Tree:
    """The tree whose rows are these paths, in this order.

    Args:
        paths: each path's parent stands before it.
        token_ids: int [D, K].

    """
    rows: dict[tuple[int, ...], int] = {(): 0}
    for path in paths:
        rows[path.ranks] = len(rows)
    names = list(rows)
    masks = np.array([[own[: len(other)] == other for other in names] for own in names])
    return Tree(
        tokens=np.array(
            [0, *(token_ids[len(p.ranks) - 1, p.candidates[-1]] for p in paths)], np.int64
        ),
        parents=np.array([-1, *(rows[p.ranks[:-1]] for p in paths)], np.int32),
        depths=np.array([len(name) for name in names], np.int32),
        ranks=np.array([-1, *(p.ranks[-1] for p in paths)], np.int32),
        scores=np.array([0.0, *(p.score for p in paths)], np.float32),
        masks=masks,
    )
