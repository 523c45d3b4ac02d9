# SPDX-License-Identifier: Apache-2.0
"""Trees over lattices: kernel and reference, every row of every buffer, ties and rounding included.

The reference itself is checked against the offline oracle, which enumerates paths and knows nothing
of heaps, and against the unary tree, which it must be where all rows of a depth are equal.
"""

import numpy as np
import pytest
import torch

from tests.oracle.lattice import best_paths, greedy_path, tree_of
from vllm_ddtree.round.meter import ONE
from vllm_ddtree.round.trees import TreeBuffers
from vllm_ddtree.tree.build import build_trees
from vllm_ddtree.tree.lattice import Rankings, build_lattice_trees
from vllm_ddtree.tree.lattice_reference import build_lattice_tree, lattice_chain
from vllm_ddtree.tree.reference import Tree, build_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
OUTPUTS = ("tokens", "parents", "depths", "masks", "num_nodes")


def chain_only(trees: TreeBuffers) -> torch.Tensor:
    return trees.chain_only


def chains(trees: TreeBuffers) -> torch.Tensor:
    return trees.chains


def draw(rng, kind, *shape):
    """Lattices in any order of candidates: distinct, tied up to rounding, tied often, or all equal.

    shape: [..., D, K]; each of K rows of a depth is drawn on its own.
    """
    shape = (*shape, shape[-1])
    raw = {
        "normal": lambda: -np.abs(rng.normal(size=shape)) * 2,
        "tenths": lambda: -0.1 * rng.integers(0, 8, shape),
        "ties": lambda: -rng.integers(0, 3, shape).astype(float),
        "equal": lambda: np.full(shape, rng.choice([0.0, -0.0, -0.3])),
    }[kind]()
    return raw.astype(np.float32)


def draw_unary(rng, kind, *shape):
    """Log-probs [..., D, K], best first."""
    values = draw(rng, kind, *shape)[..., 0, :]
    return -np.sort(-values, axis=-1)


def as_lattice(log_probs):
    """[..., D, K] to [..., D, K, K]: the same row after every candidate."""
    shape = (*log_probs.shape, log_probs.shape[-1])
    return np.ascontiguousarray(np.broadcast_to(log_probs[..., None, :], shape))


def unpack(masks):
    """Bitmask int32 [..., W] to bool [..., 32 * W]."""
    bits = masks.view(np.uint32)[..., None] >> np.arange(32, dtype=np.uint32) & 1
    return bits.astype(bool).reshape(*masks.shape[:-1], -1)


def same_tree(ours: Tree, other: Tree) -> None:
    for name in ("tokens", "parents", "depths", "ranks", "scores", "masks"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(other, name), err_msg=name)


def check_index(trees: TreeBuffers, index: int, expected: Tree) -> None:
    n, num_rows = expected.num_nodes, trees.num_rows
    assert trees.num_nodes[index].item() == n
    for name, unused in (("parents", -1), ("depths", 1), ("tokens", 0)):
        wanted = np.full(num_rows, unused)
        wanted[: n + 1] = getattr(expected, name)
        found = getattr(trees, name)[index].cpu().numpy()
        np.testing.assert_array_equal(found, wanted, err_msg=name)
    mask = np.zeros((num_rows, 32 * trees.num_words), bool)
    mask[:, 0] = True
    mask[np.arange(num_rows), np.arange(num_rows)] = True
    mask[: n + 1] = False
    mask[: n + 1, : n + 1] = expected.masks
    np.testing.assert_array_equal(unpack(trees.masks[index].cpu().numpy()), mask)


def build_and_check(
    log_probs, budget, *, depth_limit=None, chain=None, indices=None, trees=None, seed=0
):
    """Build [R, D, K, K] log-probs and compare each request with the reference.

    Returns the buffers.
    """
    num_reqs, num_depths, top_k, _ = log_probs.shape
    log_probs = log_probs.astype(np.float32)
    ids = np.random.default_rng(seed).integers(1, 150_000, (num_reqs, num_depths, top_k))
    indices = list(range(num_reqs)) if indices is None else indices
    trees = trees or TreeBuffers(max(indices) + 1, budget, DEVICE)
    chain = [0] * num_reqs if chain is None else chain
    for index, flag in zip(indices, chain, strict=True):
        if index >= 0:
            chain_only(trees)[index] = flag
    draft = torch.full((num_reqs, budget), -9, device=DEVICE)
    shares = torch.zeros(2, budget + 1, dtype=torch.int64, device=DEVICE)
    build_lattice_trees(
        torch.tensor(log_probs, device=DEVICE),
        torch.tensor(ids, device=DEVICE),
        torch.tensor(indices, device=DEVICE),
        trees,
        draft,
        depth_limit or num_depths,
        Rankings(num_reqs, num_depths, top_k, DEVICE),
        shares,
    )
    expected_shares = np.zeros((2, budget + 1))
    for r, index in enumerate(indices):
        tokens = np.zeros(budget, np.int64)
        if index >= 0:
            tree = build_lattice_tree(log_probs[r], ids[r], budget, depth_limit, bool(chain[r]))
            check_index(trees, index, tree)
            tokens[: tree.num_nodes] = tree.tokens[1:]
            walk, scores = lattice_chain(log_probs[r], ids[r], depth_limit)
            found = chains(trees)[index, : len(walk)].cpu().numpy()
            np.testing.assert_array_equal(found, walk)
            claims = np.zeros((2, budget + 1))
            claims[0, : tree.num_nodes + 1] = np.exp(tree.scores.astype(float))
            chances = np.exp([0.0, *scores])[: budget + 1]
            claims[1, : len(chances)] = chances
            np.testing.assert_allclose(trees.claims[index].cpu() / ONE, claims, atol=1e-5)
            expected_shares += 0 if chain[r] else claims
        np.testing.assert_array_equal(draft[r].cpu().numpy(), tokens)
    # Path probabilities, in fixed point, of all trees but the chains; and of the trees' chains.
    np.testing.assert_allclose(shares.cpu().numpy() / ONE, expected_shares, atol=1e-4)
    return trees


# The reference.


@pytest.mark.parametrize("kind", ["normal", "tenths", "ties", "equal"])
@pytest.mark.parametrize("num_depths,top_k", [(1, 1), (1, 5), (5, 1), (2, 3), (4, 3), (5, 4)])
def test_reference_pops_in_order_of_score_then_ranks(kind, num_depths, top_k):
    rng = np.random.default_rng(num_depths * 10 + top_k)
    ids = rng.permutation(1000)[: num_depths * top_k].reshape(num_depths, top_k)
    for budget in (1, 2, 7, 40, 2000):
        for depth_limit in {1, num_depths}:
            log_probs = draw(rng, kind, num_depths, top_k)
            tree = build_lattice_tree(log_probs, ids, budget, depth_limit)
            same_tree(tree, tree_of(best_paths(log_probs, budget, depth_limit), ids))


def test_reference_leaves_out_missing_candidates():
    rng = np.random.default_rng(3)
    ids = np.arange(12).reshape(3, 4)
    for gone in (-INF, np.nan, -np.nan):
        for _ in range(5):
            log_probs = draw(rng, "tenths", 3, 4)
            log_probs[rng.random(log_probs.shape) < 0.4] = gone
            tree = build_lattice_tree(log_probs, ids, 2000)
            same_tree(tree, tree_of(best_paths(log_probs, 2000, 3), ids))


@pytest.mark.parametrize("kind", ["normal", "tenths", "ties", "equal"])
def test_reference_is_the_unary_tree_where_rows_are_equal(kind):
    rng = np.random.default_rng(4)
    for budget, depth_limit, chain in [(1, 3, 0), (20, 7, 0), (63, 5, 0), (255, 7, 0), (20, 6, 1)]:
        log_probs = draw_unary(rng, kind, 7, 6)
        ids = rng.integers(1, 9999, log_probs.shape)
        lattice = build_lattice_tree(as_lattice(log_probs), ids, budget, depth_limit, bool(chain))
        same_tree(lattice, build_tree(log_probs, ids, budget, depth_limit, bool(chain)))


def test_chain_is_the_greedy_walk():
    rng = np.random.default_rng(5)
    ids = rng.integers(1, 9999, (6, 5))
    for kind in ("normal", "tenths", "ties"):
        log_probs = draw(rng, kind, 6, 5)
        tokens, scores = lattice_chain(log_probs, ids)
        path = greedy_path(log_probs)
        assert tokens.tolist() == [ids[d, c] for d, c in enumerate(path)]
        tree = build_lattice_tree(log_probs, ids, 6, chain=True)
        np.testing.assert_array_equal(tree.tokens[1:], tokens)
        np.testing.assert_array_equal(tree.parents, np.arange(-1, 6))
        np.testing.assert_allclose(tree.scores[1:], scores, atol=1e-5)


def test_rows_behind_the_first_of_depth_one_are_not_read():
    rng = np.random.default_rng(6)
    log_probs = draw(rng, "normal", 3, 4)
    ids = np.arange(12).reshape(3, 4)
    tree = build_lattice_tree(log_probs, ids, 20)
    log_probs[0, 1:] = np.nan
    same_tree(build_lattice_tree(log_probs, ids, 20), tree)
    build_and_check(log_probs[None], 20)


# The kernel.


@pytest.mark.parametrize("budget", [1, 2, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255])
def test_budgets(budget):
    rng = np.random.default_rng(budget)
    shape = (int(rng.integers(3, 16)), int(rng.integers(4, 17)))
    kinds = ["normal", "tenths", "ties", "equal"] if budget <= 64 else ["normal", "ties"]
    build_and_check(np.stack([draw(rng, kind, *shape) for kind in kinds]), budget)


@pytest.mark.parametrize(
    "num_depths,top_k", [(1, 1), (1, 64), (31, 1), (31, 64), (2, 3), (7, 5), (15, 16), (15, 33)]
)
def test_depths_and_candidates(num_depths, top_k):
    rng = np.random.default_rng(num_depths + 100 * top_k)
    kinds = ["normal", "ties"] if top_k > 32 else ["normal", "ties", "equal"]
    build_and_check(np.stack([draw(rng, kind, num_depths, top_k) for kind in kinds]), budget=40)


@pytest.mark.parametrize("num_depths,top_k", [(4, 3), (6, 2), (3, 5)])
def test_ties_of_every_shape(num_depths, top_k):
    """Zeros, minus ones and minus twos: ranks decide most pops."""
    rng = np.random.default_rng(top_k)
    build_and_check(draw(rng, "ties", 6, num_depths, top_k), budget=30)


@pytest.mark.parametrize("kind", ["normal", "tenths", "ties", "equal"])
def test_equal_rows_give_the_unary_kernels_buffers(kind):
    rng = np.random.default_rng(7)
    log_probs = draw_unary(rng, kind, 3, 7, 6)
    built = build_and_check(as_lattice(log_probs), 40)
    ids = np.random.default_rng(0).integers(1, 150_000, log_probs.shape)
    unary = TreeBuffers(3, 40, DEVICE)
    build_trees(
        torch.tensor(log_probs, device=DEVICE),
        torch.tensor(ids, device=DEVICE),
        torch.arange(3, device=DEVICE),
        unary,
        torch.zeros(3, 40, dtype=torch.int64, device=DEVICE),
        7,
    )
    for name in OUTPUTS:
        assert torch.equal(getattr(built, name), getattr(unary, name)), name
    assert torch.equal(chains(built), chains(unary))


def test_every_candidate_of_a_row_and_rows_below_the_last():
    """All 64 candidates of the root first, then rows 65.. below the best of them."""
    log_probs = np.full((1, 31, 64, 64), -50.0)
    log_probs[0, 0] = np.linspace(-1.1, -1, 64)
    trees = build_and_check(log_probs, budget=130)
    assert (trees.parents[0, 1:65] == 0).all()
    log_probs[:] = 0.0  # one chain to depth 31, then siblings of its end
    build_and_check(log_probs, budget=110)


def test_large_batch():
    rng = np.random.default_rng(5)
    build_and_check(draw(rng, "tenths", 24, 7, 4), budget=6)


def test_few_candidates_leave_rows_unused():
    rng = np.random.default_rng(6)
    trees = build_and_check(draw(rng, "normal", 2, 2, 3), budget=255)
    assert trees.num_nodes.tolist() == [3 + 9] * 2


def test_depth_limit():
    rng = np.random.default_rng(7)
    log_probs = draw(rng, "ties", 2, 9, 3)
    for depth_limit in (1, 3):
        trees = build_and_check(log_probs, budget=20, depth_limit=depth_limit)
        assert trees.depths.max().item() == depth_limit


def test_chain_is_chosen_by_index():
    rng = np.random.default_rng(8)
    log_probs = draw(rng, "ties", 4, 15, 4)
    trees = build_and_check(log_probs, budget=20, chain=[1, 0, 1, 0], indices=[3, 1, 0, 2])
    assert trees.num_nodes[[3, 1, 0, 2]].tolist() == [15, 20, 15, 20]
    build_and_check(log_probs, budget=7, chain=[1, 1, 0, 1])  # shorter than the chain


@pytest.mark.parametrize("gone", [-INF, np.nan, -np.nan])
def test_missing_candidates(gone):
    rng = np.random.default_rng(9)
    log_probs = draw(rng, "tenths", 7, 5, 4)
    log_probs[0, 0, :, 1:] = gone  # the root keeps one child
    log_probs[1, 2] = gone  # nothing below depth 2
    log_probs[2, 1:, :, 2] = gone
    log_probs[3] = gone  # nothing at all
    log_probs[4, 1:, 2] = gone  # nothing below candidate 2
    log_probs[5] = -2e38  # a second step overflows
    log_probs[6][rng.random(log_probs[6].shape) < 0.5] = gone
    trees = build_and_check(log_probs, budget=33)
    assert trees.num_nodes.tolist()[3] == 0 and trees.num_nodes.tolist()[5] == 4


def test_signed_zeros_and_smallest_scores():
    """-0.0 ties with 0.0, and subnormal scores keep their order."""
    rng = np.random.default_rng(10)
    values = np.array([-0.0, 0.0, -1e-45, -3e-45], np.float32)
    build_and_check(rng.choice(values, (8, 3, 4, 4)), budget=40)


def test_only_named_indices_are_written():
    """Inert rows and unnamed indices leave every buffer as it was."""
    rng = np.random.default_rng(10)
    trees = TreeBuffers(300, 33, DEVICE)
    for name in OUTPUTS:
        getattr(trees, name).fill_(77)
    log_probs = draw(rng, "normal", 5, 6, 8)
    build_and_check(log_probs, 33, indices=[299, -1, 7, 0, -1], trees=trees)
    others = [index for index in range(300) if index not in (299, 7, 0)]
    for name in OUTPUTS:
        assert (getattr(trees, name)[others] == 77).all(), name
    assert (chain_only(trees) == 0).all()


def test_a_smaller_tree_clears_a_bigger_one():
    rng = np.random.default_rng(11)
    trees = TreeBuffers(4, 70, DEVICE)
    build_and_check(draw(rng, "normal", 2, 8, 8), 70, indices=[1, 3], trees=trees)
    build_and_check(draw(rng, "ties", 2, 2, 2), 70, indices=[3, 1], trees=trees)
    build_and_check(np.full((2, 2, 2, 2), -INF), 70, indices=[1, 3], trees=trees)
    fresh = TreeBuffers(4, 70, DEVICE)
    for name in OUTPUTS:
        assert torch.equal(getattr(trees, name), getattr(fresh, name)), name


def test_strided_inputs_and_scratch_that_is_larger():
    """Every dimension but the last may be a view, in its own way for each tensor."""
    rng = np.random.default_rng(12)
    num_reqs, num_depths, top_k, budget = 3, 5, 4, 12
    values = torch.tensor(draw(rng, "tenths", num_reqs, num_depths, top_k))
    ids = torch.tensor(rng.integers(1, 9999, values.shape[:3]))
    wide = torch.full((2 * num_reqs, num_depths + 2, top_k + 1, top_k + 3), 5.0, device=DEVICE)
    log_probs = wide[::2, 1:-1, 1:, 2 : 2 + top_k]
    log_probs.copy_(values)
    turned = torch.zeros(num_depths, num_reqs, top_k, dtype=torch.int32, device=DEVICE)
    turned.copy_(ids.transpose(0, 1))
    board = torch.full((num_reqs, budget + 4), -9, device=DEVICE)
    indices = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    trees = TreeBuffers(3, budget, DEVICE)
    rankings = Rankings(num_reqs + 2, num_depths + 4, top_k, DEVICE)
    rankings.entries.fill_(-1)
    for depth_limit in (num_depths, 2):  # the second finds what the first has left
        build_lattice_trees(
            log_probs,
            turned.transpose(0, 1),
            indices,
            trees,
            board[:, 2:-2],
            depth_limit,
            rankings,
        )
        for r, index in enumerate((2, 0, 1)):
            tree = build_lattice_tree(values[r].numpy(), ids[r].numpy(), budget, depth_limit)
            check_index(trees, index, tree)
            assert board[r, 2 : 2 + tree.num_nodes].tolist() == tree.tokens[1:].tolist()
        assert (board[:, :2] == -9).all() and (board[:, -2:] == -9).all()
    assert (rankings.entries[num_reqs:] == -1).all()


def test_no_requests():
    trees = TreeBuffers(1, 3, DEVICE)
    empty = torch.zeros(0, 2, 2, 2, device=DEVICE)
    indices = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    build_lattice_trees(
        empty,
        empty[:, :, 0].long(),
        indices,
        trees,
        indices.new_zeros(0, 3),
        2,
        Rankings(1, 2, 2, DEVICE),
    )


def good_arguments():
    return {
        "log_probs": torch.zeros(2, 3, 4, 4, device=DEVICE),
        "token_ids": torch.zeros(2, 3, 4, dtype=torch.int64, device=DEVICE),
        "indices": torch.arange(2, device=DEVICE),
        "trees": TreeBuffers(2, 5, DEVICE),
        "draft_tokens": torch.zeros(2, 5, dtype=torch.int64, device=DEVICE),
        "depth_limit": 3,
        "rankings": Rankings(2, 3, 4, DEVICE),
    }


@pytest.mark.parametrize(
    "argument,change",
    [
        ("log_probs", lambda t: t.double()),
        ("log_probs", lambda t: t[0]),
        ("log_probs", lambda t: t[:, :, :3]),
        ("log_probs", lambda t: t.new_zeros(2, 32, 4, 4)),
        ("log_probs", lambda t: t.mT),
        ("token_ids", lambda t: t[:1]),
        ("token_ids", lambda t: t.short()),
        ("token_ids", lambda t: t.new_zeros(2, 4, 3).mT),
        ("indices", lambda t: t[:1]),
        ("indices", lambda t: t.float()),
        ("indices", lambda t: t.new_zeros(4)[::2]),
        ("draft_tokens", lambda t: t[:, :4]),
        ("draft_tokens", lambda t: t.int()),
        ("draft_tokens", lambda t: t.new_zeros(5, 2).T),
        ("depth_limit", lambda t: 0),
        ("depth_limit", lambda t: 4),
        ("rankings", lambda t: Rankings(1, 3, 4, DEVICE)),
        ("rankings", lambda t: Rankings(2, 2, 4, DEVICE)),
        ("rankings", lambda t: Rankings(2, 3, 5, DEVICE)),
    ],
)
def test_arguments_that_do_not_fit(argument, change):
    arguments = good_arguments()
    build_lattice_trees(**arguments)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=argument):
        build_lattice_trees(**arguments)


@pytest.mark.parametrize(
    "num_reqs,depth,top_k", [(0, 3, 4), (2, 0, 4), (2, 32, 4), (2, 3, 0), (2, 3, 65)]
)
def test_scratch_sizes_that_do_not_fit(num_reqs, depth, top_k):
    with pytest.raises(ValueError, match=r"max_num_reqs|depth"):
        Rankings(num_reqs, depth, top_k, DEVICE)
