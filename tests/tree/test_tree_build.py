# SPDX-License-Identifier: Apache-2.0
"""The kernel builds the oracle's tree: every row of every buffer, ties and rounding included."""

import numpy as np
import pytest
import torch

from vllm_ddtree.round.meter import ONE
from vllm_ddtree.round.trees import TreeBuffers, words
from vllm_ddtree.tree.build import build_trees
from vllm_ddtree.tree.reference import Tree, build_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
OUTPUTS = ("tokens", "parents", "depths", "masks", "num_nodes")


def unpack(masks):
    """Bitmask int32 [..., W] to bool [..., 32 * W]."""
    bits = masks.view(np.uint32)[..., None] >> np.arange(32, dtype=np.uint32) & 1
    return bits.astype(bool).reshape(*masks.shape[:-1], -1)


def check_index(trees: TreeBuffers, index: int, expected: Tree):
    n, num_rows = expected.num_nodes, trees.num_rows
    assert trees.num_nodes[index].item() == n
    for name, unused in (("parents", -1), ("depths", 1), ("tokens", 0)):
        wanted = np.full(num_rows, unused)
        wanted[: n + 1] = getattr(expected, name)
        np.testing.assert_array_equal(
            getattr(trees, name)[index].cpu().numpy(), wanted, err_msg=name
        )
    mask = np.zeros((num_rows, 32 * trees.num_words), bool)
    mask[:, 0] = True
    mask[np.arange(num_rows), np.arange(num_rows)] = True
    mask[: n + 1] = False
    mask[: n + 1, : n + 1] = expected.masks
    np.testing.assert_array_equal(unpack(trees.masks[index].cpu().numpy()), mask)


def build_and_check(
    log_probs, budget, *, depth_limit=None, chain=None, indices=None, trees=None, seed=0
):
    """Build [R, D, K] log-probs and compare each request with the oracle. Returns the buffers."""
    num_reqs, num_depths, _ = log_probs.shape
    log_probs = log_probs.astype(np.float32)
    ids = np.random.default_rng(seed).integers(1, 150_000, log_probs.shape)
    indices = list(range(num_reqs)) if indices is None else indices
    trees = trees or TreeBuffers(max(indices) + 1, budget, DEVICE)
    chain = [0] * num_reqs if chain is None else chain
    for index, flag in zip(indices, chain, strict=True):
        if index >= 0:
            trees.chain_only[index] = flag
    draft = torch.full((num_reqs, budget), -9, device=DEVICE)
    shares = torch.zeros(2, budget + 1, dtype=torch.int64, device=DEVICE)
    build_trees(
        torch.tensor(log_probs, device=DEVICE),
        torch.tensor(ids, device=DEVICE),
        torch.tensor(indices, device=DEVICE),
        trees,
        draft,
        depth_limit or num_depths,
        shares,
    )
    expected_shares = np.zeros((2, budget + 1))
    for r, index in enumerate(indices):
        tokens = np.zeros(budget, np.int64)
        if index >= 0:
            tree = build_tree(log_probs[r], ids[r], budget, depth_limit, bool(chain[r]))
            check_index(trees, index, tree)
            tokens[: tree.num_nodes] = tree.tokens[1:]
            first = ids[r, : depth_limit or num_depths, 0]
            np.testing.assert_array_equal(trees.chains[index, : len(first)].cpu().numpy(), first)
            claims = np.zeros((2, budget + 1))
            claims[0, : tree.num_nodes + 1] = np.exp(tree.scores.astype(float))
            best = log_probs[r, : depth_limit or num_depths, 0].astype(float)
            chances = np.exp(np.cumsum([0.0, *np.where(best > -np.inf, best, -np.inf)]))
            claims[1, : len(chances)] = chances[: budget + 1]
            np.testing.assert_allclose(trees.claims[index].cpu() / ONE, claims, atol=1e-5)
            expected_shares += 0 if chain[r] else claims
        np.testing.assert_array_equal(draft[r].cpu().numpy(), tokens)
    # Path probabilities, in fixed point, of the trees (but not of chains alone) and their chains.
    np.testing.assert_allclose(shares.cpu().numpy() / ONE, expected_shares, atol=1e-4)
    return trees


def draw(rng, kind, *shape):
    """Log-probs, best first: distinct, tied up to rounding, tied often, or all equal."""
    raw = {
        "normal": lambda: -np.abs(rng.normal(size=shape)) * 2,
        "tenths": lambda: -0.1 * rng.integers(0, 8, shape),
        "ties": lambda: -rng.integers(0, 3, shape).astype(float),
        "equal": lambda: np.full(shape, rng.choice([0.0, -0.0, -0.3])),
    }[kind]()
    return -np.sort(-raw.astype(np.float32), axis=-1)


@pytest.mark.parametrize("budget", [1, 2, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255])
def test_budgets(budget):
    rng = np.random.default_rng(budget)
    shape = (int(rng.integers(3, 16)), int(rng.integers(4, 17)))
    kinds = ["normal", "tenths", "ties", "equal"] if budget <= 64 else ["normal", "ties"]
    build_and_check(np.stack([draw(rng, kind, *shape) for kind in kinds]), budget)


@pytest.mark.parametrize(
    "num_depths,top_k", [(1, 1), (1, 64), (31, 1), (31, 64), (2, 3), (7, 5), (16, 16), (15, 33)]
)
def test_depths_and_candidates(num_depths, top_k):
    rng = np.random.default_rng(num_depths + 100 * top_k)
    kinds = ["normal", "ties", "equal"]
    build_and_check(np.stack([draw(rng, kind, num_depths, top_k) for kind in kinds]), budget=40)


@pytest.mark.parametrize("num_depths,top_k", [(4, 3), (6, 2), (3, 5)])
def test_ties_of_every_shape(num_depths, top_k):
    """Zeros, minus ones and minus twos, sorted and not: ranks decide most pops."""
    rng = np.random.default_rng(top_k)
    raw = -rng.integers(0, 3, (12, num_depths, top_k)).astype(np.float32)
    raw[:6] = -np.sort(-raw[:6], axis=-1)
    build_and_check(raw, budget=30)


def test_ranks_up_to_the_last_candidate_in_the_deepest_rows():
    """All 64 candidates of the root first, then rows 65.. below the last of them."""
    log_probs = np.full((1, 31, 64), -50.0)
    log_probs[0, 0] = np.linspace(-1, -1.1, 64)
    build_and_check(log_probs, budget=130)
    log_probs[:] = 0.0  # one chain to depth 31, then siblings of its end
    build_and_check(log_probs, budget=110)


def test_large_batch():
    rng = np.random.default_rng(5)
    build_and_check(draw(rng, "tenths", 64, 7, 4), budget=6)


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
    log_probs = draw(rng, "tenths", 6, 5, 4)
    log_probs[0, 0, 1] = gone  # the root keeps one child
    log_probs[1, 2, 0] = gone  # nothing below depth 2
    log_probs[2, 1:, 2] = gone
    log_probs[3] = gone  # nothing at all
    log_probs[4, :, 1:] = gone  # a chain without the flag
    log_probs[5] = -2e38  # a second step overflows
    trees = build_and_check(log_probs, budget=33)
    assert trees.num_nodes.tolist()[3:] == [0, 5, 4]


def test_signed_zeros_and_smallest_scores():
    """-0.0 ties with 0.0, and subnormal scores keep their order."""
    log_probs = np.array([[[-0.0, -0.0], [0.0, -1e-45]], [[-1e-45, -3e-45], [-0.0, -1e-45]]])
    build_and_check(log_probs, budget=6)


def test_only_named_slots_are_written():
    """Inert rows and unnamed indices leave every by-index buffer as it was."""
    rng = np.random.default_rng(10)
    trees = TreeBuffers(300, 33, DEVICE)
    for name in OUTPUTS:
        getattr(trees, name).fill_(77)
    log_probs = draw(rng, "normal", 5, 6, 8)
    build_and_check(log_probs, 33, indices=[299, -1, 7, 0, -1], trees=trees)
    others = [index for index in range(300) if index not in (299, 7, 0)]
    for name in OUTPUTS:
        assert (getattr(trees, name)[others] == 77).all(), name
    assert (trees.chain_only == 0).all()


def test_a_smaller_tree_clears_a_bigger_one():
    rng = np.random.default_rng(11)
    trees = TreeBuffers(4, 70, DEVICE)
    build_and_check(draw(rng, "normal", 2, 8, 8), 70, indices=[1, 3], trees=trees)
    build_and_check(draw(rng, "ties", 2, 2, 2), 70, indices=[3, 1], trees=trees)
    build_and_check(np.full((2, 2, 2), -INF), 70, indices=[1, 3], trees=trees)
    fresh = TreeBuffers(4, 70, DEVICE)
    for name in OUTPUTS:
        assert torch.equal(getattr(trees, name), getattr(fresh, name)), name


def test_strided_inputs():
    """Every dimension but the last may be a view, in its own way for each tensor."""
    rng = np.random.default_rng(12)
    num_reqs, num_depths, top_k, budget = 3, 5, 4, 12
    values = torch.tensor(draw(rng, "tenths", num_reqs, num_depths, top_k))
    ids = torch.tensor(rng.integers(1, 9999, values.shape))
    wide = torch.full((2 * num_reqs, num_depths + 2, top_k + 3), 5.0, device=DEVICE)
    log_probs = wide[::2, 1:-1, 2 : 2 + top_k]
    log_probs.copy_(values)
    turned = torch.zeros(num_depths, num_reqs, top_k, dtype=torch.int32, device=DEVICE)
    turned.copy_(ids.transpose(0, 1))
    board = torch.full((num_reqs, budget + 4), -9, device=DEVICE)
    indices = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    trees = TreeBuffers(3, budget, DEVICE)
    build_trees(log_probs, turned.transpose(0, 1), indices, trees, board[:, 2:-2], num_depths)
    for r, index in enumerate((2, 0, 1)):
        tree = build_tree(values[r].numpy(), ids[r].numpy(), budget)
        check_index(trees, index, tree)
        assert board[r, 2:-2].tolist() == tree.tokens[1:].tolist()
    assert (board[:, :2] == -9).all() and (board[:, -2:] == -9).all()


def test_no_requests():
    trees = TreeBuffers(1, 3, DEVICE)
    empty = torch.zeros(0, 2, 2, device=DEVICE)
    indices = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    build_trees(empty, empty.long(), indices, trees, indices.new_zeros(0, 3), 2)


def good_arguments():
    return {
        "log_probs": torch.zeros(2, 3, 4, device=DEVICE),
        "token_ids": torch.zeros(2, 3, 4, dtype=torch.int64, device=DEVICE),
        "indices": torch.arange(2, device=DEVICE),
        "trees": TreeBuffers(2, 5, DEVICE),
        "draft_tokens": torch.zeros(2, 5, dtype=torch.int64, device=DEVICE),
        "depth_limit": 3,
    }


@pytest.mark.parametrize(
    "argument,change",
    [
        ("log_probs", lambda t: t.double()),
        ("log_probs", lambda t: t[0]),
        ("log_probs", lambda t: t.new_zeros(2, 3, 65)),
        ("log_probs", lambda t: t.new_zeros(2, 32, 4)),
        ("log_probs", lambda t: t.new_zeros(2, 4, 3).mT),
        ("token_ids", lambda t: t[:1]),
        ("token_ids", lambda t: t.short()),
        ("indices", lambda t: t[:1]),
        ("indices", lambda t: t.float()),
        ("indices", lambda t: t.new_zeros(4)[::2]),
        ("draft_tokens", lambda t: t[:, :4]),
        ("draft_tokens", lambda t: t.int()),
        ("draft_tokens", lambda t: t.new_zeros(5, 2).T),
        ("depth_limit", lambda t: 0),
        ("depth_limit", lambda t: 4),
    ],
)
def test_arguments_that_do_not_fit(argument, change):
    arguments = good_arguments()
    build_trees(**arguments)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=argument):
        build_trees(**arguments)


@pytest.mark.parametrize("budget", [1, 31, 32, 255])
def test_buffers_start_as_empty_trees(budget):
    trees = TreeBuffers(3, budget, DEVICE)
    assert trees.num_words == words(budget) == trees.masks.shape[2]
    assert trees.chain_only.tolist() == [0, 0, 0]
    empty = build_tree(np.full((1, 1), -INF, np.float32), np.zeros((1, 1), np.int64), budget)
    for index in range(3):
        check_index(trees, index, empty)


def test_words():
    assert [words(b) for b in (1, 30, 31, 32, 62, 63, 64, 255)] == [1, 1, 1, 2, 2, 2, 3, 8]


@pytest.mark.parametrize("max_num_reqs,budget", [(1, 0), (1, 256), (0, 5)])
def test_buffer_sizes_that_do_not_fit(max_num_reqs, budget):
    with pytest.raises(ValueError, match=r"budget|max_num_reqs"):
        TreeBuffers(max_num_reqs, budget, DEVICE)
