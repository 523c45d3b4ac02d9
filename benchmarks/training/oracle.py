# SPDX-License-Identifier: Apache-2.0
"""Acceptance of a draft, offline: walk texts of the target round by round.

A round at a position drafts a lattice, grows a best-first tree over it, and takes the longest path
of the tree that the text follows, and one token more. A chain takes the best candidate of each row.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

BUDGETS = (3, 7, 15, 31, 63)
Lattice = tuple[NDArray[np.float32], NDArray[np.int64]]  # log-probs [D, K, K], token ids [D, K]


def true_path(lattice: Lattice, text: NDArray[np.integer], budget: int) -> list[int]:
    """How many nodes the best-first tree has when it reaches each node that the text follows.

    Args:
        lattice: row [0, 0] follows the root.
        text: the tokens that follow the root.
        budget: nodes to grow.

    """
    log_probs, ids = lattice
    orders: dict[tuple[int, int], NDArray[np.intp]] = {}

    def order(depth: int, before: int) -> NDArray[np.intp]:
        key = depth, before
        if key not in orders:
            orders[key] = np.argsort(-log_probs[depth, before], kind="stable")
        return orders[key]

    num_depths = min(len(ids), len(text))
    reached: list[int] = []
    # (-score, ranks, score of the parent, candidate of the parent, on the text so far)
    heap: list[tuple[float, tuple[int, ...], float, int, bool]] = []

    def push(ranks: tuple[int, ...], score: float, before: int, on: bool) -> None:
        depth = len(ranks) - 1
        if depth >= num_depths or ranks[-1] >= ids.shape[1]:
            return
        row = log_probs[depth, before]
        own = score + float(row[order(depth, before)[ranks[-1]]])
        if own > -np.inf:
            heapq.heappush(heap, (-own, ranks, score, before, on))

    push((0,), 0.0, 0, True)
    for count in range(1, budget + 1):
        if not heap:
            break
        score, ranks, parent_score, before, on = heapq.heappop(heap)
        depth = len(ranks) - 1
        candidate = int(order(depth, before)[ranks[-1]])
        follows = on and ids[depth, candidate] == text[depth]
        if follows:
            reached.append(count)
        push((*ranks[:-1], ranks[-1] + 1), parent_score, before, on)
        push((*ranks, 0), -score, candidate, bool(follows))
    return reached


def chain_length(lattice: Lattice, text: NDArray[np.integer]) -> int:
    """Tokens of the chain that the text follows."""
    log_probs, ids = lattice
    before = 0
    for depth in range(min(len(ids), len(text))):
        candidate = int(log_probs[depth, before].argmax())
        if ids[depth, candidate] != text[depth]:
            return depth
        before = candidate
    return min(len(ids), len(text))


def acceptance(
    texts: NDArray[np.integer],
    prompt: int,
    lattice_at: Callable[[int, int], Lattice],
    depth: int,
    budgets: tuple[int, ...] = BUDGETS,
) -> dict[str, float]:
    """Mean tokens a round, bonus included, for a chain and for trees.

    Args:
        texts: int [N, L], of the target.
        prompt: tokens of each that are given.
        lattice_at: (text, position of the anchor) -> lattice.
        depth: longest path.
        budgets: sizes of the trees.

    """
    last = texts.shape[1] - depth - 1
    out: dict[str, float] = {}
    for name in ("chain", *budgets):
        rounds = tokens = 0
        for number, text in enumerate(texts):
            at = prompt - 1
            while at < last:
                lattice = lattice_at(number, at)
                after = text[at + 1 : at + 1 + depth]
                if name == "chain":
                    taken = chain_length(lattice, after)
                else:
                    taken = len(true_path(lattice, after, int(name)))
                rounds += 1
                tokens += taken + 1
                at += taken + 1
        out[str(name)] = round(tokens / rounds, 3)
    return out


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown table, a row a draft."""
    columns = list(next(iter(rows.values())))
    lines = ["| | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{row[c]:.2f}" for c in columns) + " |")
    return "\n".join(lines)
