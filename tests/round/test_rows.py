# SPDX-License-Identifier: Apache-2.0
"""The kernel that lays out a step's rows gives what a plain loop gives."""

import numpy as np
import pytest
import torch

from tests.attention.tree_cases import ancestor_sets, pack_masks, random_tree
from vllm_ddtree.round.layout import Layout
from vllm_ddtree.round.paths import Paths
from vllm_ddtree.round.rows import RowBuffers, prepare_rows
from vllm_ddtree.round.trees import TreeBuffers

MAX_ROWS, MAX_REQS = 400, 9


def random_trees(budget: int, rng: np.random.Generator) -> TreeBuffers:
    trees = TreeBuffers(MAX_REQS, budget, torch.get_default_device())
    for index in range(MAX_REQS):
        num_rows = int(rng.integers(2, budget + 2))
        sets = ancestor_sets(random_tree(rng, num_rows, 15))
        trees.masks[index, :num_rows] = pack_masks(sets, trees.num_words)
        trees.depths[index, :num_rows] = torch.tensor([len(s) - 1 for s in sets])
        trees.num_nodes[index] = num_rows - 1
    return trees


def stale_rows(budget: int) -> tuple[RowBuffers, Paths]:
    """Row buffers, and the gather index of the paths, as a round with other contents left them."""
    rows = RowBuffers(MAX_ROWS, MAX_REQS, budget, torch.get_default_device())
    paths = Paths.empty(MAX_REQS, 1, MAX_ROWS, torch.get_default_device())
    for tensor in (rows.positions, rows.masks, rows.tail_lens, rows.prefix_lens):
        tensor.fill_(-7)
    paths.gather_index.fill_(-7)
    return rows, paths


# (query rows, logits, computed tokens) of each request
BATCHES = {
    "one tree": [(8, 8, 100)],
    "plain decode": [(1, 1, 5), (1, 1, 900)],
    "mixed": [(1, 1, 3), (130, 1, 64), (8, 8, 2**20), (5, 1, 0), (3, 3, 0), (1, 1, 17)],
    "rows before the tree": [(20, 4, 50), (8, 8, 33)],
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("budget", [7, 15, 31, 32, 70])
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_rows_follow_the_trees(
    batch: list[tuple[int, int, int]], budget: int, in_place: bool
) -> None:
    rng = np.random.default_rng(budget)
    trees, (rows, paths) = random_trees(budget, rng), stale_rows(budget)
    num_reqs, padded_reqs, padded_rows = len(batch), 2, 11
    indices = torch.tensor(rng.permutation(MAX_REQS)[:num_reqs])
    lens = [query_len for query_len, _, _ in batch]
    num_rows = sum(lens)
    starts = torch.tensor(np.cumsum([0, *lens, 0, 0]), dtype=torch.int32)
    logits = torch.tensor(np.cumsum([0] + [n for _, n, _ in batch]), dtype=torch.int32)
    seq_lens = torch.tensor([c + q for q, _, c in batch] + [1] * padded_reqs, dtype=torch.int32)
    linear = torch.cat([torch.arange(c, c + q) for q, _, c in batch])

    expected = RowBuffers(MAX_ROWS, MAX_REQS, budget, torch.get_default_device())
    expected.positions[:num_rows] = linear
    for req, (query_len, n, computed) in enumerate(batch):
        if n == 1:
            continue
        end = int(starts[req + 1])
        root_position = computed + query_len - n
        expected.positions[end - n : end] = root_position + trees.depths[indices[req], :n]
        expected.masks[end - n : end] = trees.masks[indices[req], :n]
        expected.tail_lens[req] = n
        expected.prefix_lens[req] = root_position

    if in_place:
        rows.positions[:num_rows] = linear
        linear = rows.positions
    prepare_rows(
        trees,
        rows,
        paths,
        Layout(indices, starts, logits),
        seq_lens,
        linear,
        num_reqs_padded=num_reqs + padded_reqs,
        num_tokens_padded=num_rows + padded_rows,
        max_query_len=max(lens),
    )
    num_reqs += padded_reqs
    num_rows += padded_rows
    for name, filled in [
        ("positions", num_rows),
        ("masks", num_rows),
        ("tail_lens", num_reqs),
        ("prefix_lens", num_reqs),
    ]:
        got, want = getattr(rows, name), getattr(expected, name)
        torch.testing.assert_close(got[:filled], want[:filled], rtol=0, atol=0, msg=name)
        assert (got[filled:] == -7).all(), f"{name} written past the batch"
    assert paths.gather_index.tolist() == [*range(num_rows), *[-7] * (MAX_ROWS - num_rows)]


def test_dummy_request_has_no_tree() -> None:
    trees, (rows, paths) = random_trees(7, np.random.default_rng(0)), stale_rows(7)
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    prepare_rows(
        trees,
        rows,
        paths,
        Layout(torch.tensor([-1, 4]), starts, starts),
        torch.tensor([8, 30], dtype=torch.int32),
        torch.arange(16),
        num_reqs_padded=2,
        num_tokens_padded=16,
        max_query_len=8,
    )
    assert rows.tail_lens[:2].tolist() == [0, 8]
    assert rows.prefix_lens[:2].tolist() == [0, 22]
    assert rows.positions[:8].tolist() == list(range(8))
    assert (rows.masks[:8] == 0).all()


@pytest.mark.parametrize("alone", [False, True])
def test_a_root_alone(alone: bool) -> None:
    """It is a tree where requests share, and a plain row elsewhere."""
    trees, (rows, paths) = random_trees(7, np.random.default_rng(0)), stale_rows(7)
    starts = torch.tensor([0, 1, 4], dtype=torch.int32)
    prepare_rows(
        trees,
        rows,
        paths,
        Layout(torch.tensor([2, 4]), starts, starts),
        torch.tensor([20, 33], dtype=torch.int32),
        torch.tensor([19, 30, 31, 32]),
        num_reqs_padded=2,
        num_tokens_padded=4,
        max_query_len=8,
        roots_alone=alone,
    )
    assert rows.tail_lens[:2].tolist() == [int(alone), 3]
    assert rows.prefix_lens[:2].tolist() == [19 * alone, 30]
    assert rows.positions[0] == 19
    assert rows.masks[0].tolist() == [int(alone)]


@pytest.mark.parametrize(
    ("budget", "num_reqs", "num_rows"),
    [(8, 1, 8), (7, MAX_REQS + 1, 8), (7, 1, MAX_ROWS + 1)],
    ids=["another budget", "too many requests", "too many rows"],
)
def test_what_does_not_fit_is_refused(budget: int, num_reqs: int, num_rows: int) -> None:
    trees = TreeBuffers(MAX_REQS, 7, torch.get_default_device())
    index = torch.zeros(num_reqs + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="row buffers"):
        prepare_rows(
            trees,
            *stale_rows(budget),
            Layout(index[1:], index.int(), index.int()),
            index.int(),
            index,
            num_reqs_padded=num_reqs,
            num_tokens_padded=num_rows,
            max_query_len=8,
        )


def test_budget_must_be_positive() -> None:
    with pytest.raises(ValueError, match="budget"):
        RowBuffers(16, 2, 0, torch.get_default_device())
