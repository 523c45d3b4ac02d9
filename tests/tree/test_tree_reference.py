# SPDX-License-Identifier: Apache-2.0
"""The reference builds the trees of definitions that use neither a heap nor a tree."""

import itertools

import numpy as np
import pytest

from vllm_ddtree.tree.reference import accepted_path, build_tree

INF = float("inf")


def paths(tree):
    """Rank tuple of every node, in row order."""
    out = [()]
    for row in range(1, tree.num_nodes + 1):
        out.append((*out[tree.parents[row]], int(tree.ranks[row])))
    return out[1:]


def by_sorting(log_probs, budget):
    """All rank tuples by (score descending, tuple ascending).

    Valid for log-probs <= 0 in descending order, where neither a child nor a later sibling can
    come before what it follows.
    """
    num_depths, top_k = log_probs.shape
    scored = []
    for depth in range(1, num_depths + 1):
        for path in itertools.product(range(top_k), repeat=depth):
            score = np.float32(0)
            for position, rank in enumerate(path):
                score = np.float32(score + log_probs[position, rank])
            if score > -INF:
                scored.append((-float(score), path))
    return [path for _, path in sorted(scored)][:budget]


def draw(rng, num_depths, top_k, kind):
    if kind == "normal":
        raw = -np.abs(rng.normal(size=(num_depths, top_k)))
    elif kind == "tenths":  # sums that tie or not by rounding alone
        raw = -0.1 * rng.integers(0, 6, (num_depths, top_k))
    else:
        raw = -rng.integers(0, 3, (num_depths, top_k)).astype(float)
    return -np.sort(-raw, axis=1).astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "tenths", "ties"])
@pytest.mark.parametrize("num_depths,top_k", [(1, 1), (1, 5), (5, 1), (2, 3), (4, 3), (5, 4)])
def test_pops_in_order_of_score_then_ranks(kind, num_depths, top_k):
    rng = np.random.default_rng(num_depths * 10 + top_k)
    for budget in (1, 2, 7, 40, 2000):
        log_probs = draw(rng, num_depths, top_k, kind)
        tree = build_tree(log_probs, np.zeros((num_depths, top_k), np.int64), budget)
        assert paths(tree) == by_sorting(log_probs, budget)


def test_maximises_the_sum_of_path_probabilities():
    """Against every prefix-closed set of 4 nodes."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        log_probs = draw(rng, 3, 2, "normal")
        nodes = [p for d in (1, 2, 3) for p in itertools.product(range(2), repeat=d)]
        weight = {p: np.exp(sum(float(log_probs[i, r]) for i, r in enumerate(p))) for p in nodes}
        best = max(
            sum(weight[p] for p in chosen)
            for chosen in itertools.combinations(nodes, 4)
            if all(len(p) == 1 or p[:-1] in chosen for p in chosen)
        )
        tree = build_tree(log_probs, np.zeros((3, 2), np.int64), 4)
        np.testing.assert_allclose(sum(weight[p] for p in paths(tree)), best, rtol=1e-12)


def test_fields_of_a_tree_drawn_by_hand():
    log_probs = np.array([[-0.1, -2.5], [-0.2, -2.0]], np.float32)
    tree = build_tree(log_probs, np.array([[10, 11], [20, 21]]), budget=5)
    # 10 (-0.1), 10 20 (-0.3), 10 21 (-2.1), 11 (-2.5), 11 20 (-2.7)
    assert tree.tokens.tolist() == [0, 10, 20, 21, 11, 20]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0, 4]
    assert tree.depths.tolist() == [0, 1, 2, 2, 1, 2]
    assert tree.ranks.tolist() == [-1, 0, 0, 1, 1, 0]
    assert tree.scores.dtype == np.float32
    assert tree.scores[5] == np.float32(np.float32(-2.5) + np.float32(-0.2))
    assert tree.masks.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 1, 1],
    ]


def test_chain_is_the_best_token_of_each_depth():
    log_probs = np.array([[-0.1, -0.2], [-5, -6], [-0.1, -0.1]], np.float32)
    ids = np.array([[1, 2], [3, 4], [5, 6]])
    tree = build_tree(log_probs, ids, budget=7, chain=True)
    assert tree.tokens.tolist() == [0, 1, 3, 5]
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    assert build_tree(log_probs, ids, budget=2, chain=True).tokens.tolist() == [0, 1, 3]


def test_depth_limit():
    tree = build_tree(np.full((4, 2), -1, np.float32), np.zeros((4, 2), int), 99, depth_limit=2)
    assert tree.num_nodes == 2 + 4 and tree.depths.max() == 2


@pytest.mark.parametrize("gone", [-INF, np.nan])
def test_missing_candidates_end_their_siblings(gone):
    log_probs = np.array([[-1, gone, -2], [-1, -1, -1], [gone, -1, -1]], np.float32)
    tree = build_tree(log_probs, np.arange(9).reshape(3, 3), budget=99)
    assert sorted(paths(tree)) == [(0,), (0, 0), (0, 1), (0, 2)]


def test_a_score_that_overflows_does_not_exist():
    tree = build_tree(np.full((3, 1), -2e38, np.float32), np.zeros((3, 1), int), 9)
    assert tree.num_nodes == 1


def test_nothing_to_draft():
    tree = build_tree(np.full((3, 2), -INF, np.float32), np.zeros((3, 2), int), 9)
    assert tree.num_nodes == 0 and tree.masks.tolist() == [[True]]


def test_accepted_path():
    tree = build_tree(
        np.array([[-0.1, -2.5], [-0.2, -2.0]], np.float32), np.array([[10, 11], [20, 21]]), 5
    )
    # Rows: 1 = 10, 2 = 10 20, 3 = 10 21, 4 = 11, 5 = 11 20.
    assert accepted_path(tree, np.array([99, 0, 0, 0, 0, 0])) == ([], 99)
    assert accepted_path(tree, np.array([20, 0, 0, 0, 0, 0])) == ([], 20)  # not a child of the root
    assert accepted_path(tree, np.array([10, 21, 1, 7, 1, 1])) == ([1, 3], 7)
    assert accepted_path(tree, np.array([11, 1, 1, 1, 20, 8])) == ([4, 5], 8)
    assert accepted_path(tree, np.array([11, 1, 1, 1, 21, 8])) == ([4], 21)
    assert accepted_path(tree, np.array([10, 10, 1, 1, 1, 1])) == ([1], 10)
