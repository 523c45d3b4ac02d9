# SPDX-License-Identifier: Apache-2.0
"""The kernel that places nodes on several axes gives what a plain loop gives."""

import numpy as np
import pytest
import torch

from tests.round.test_rows import MAX_REQS, MAX_ROWS, random_trees
from vllm_ddtree.round.axes import place_nodes
from vllm_ddtree.round.layout import Layout
from vllm_ddtree.round.paths import Paths
from vllm_ddtree.round.rows import RowBuffers, prepare_rows

# (query rows, logits, computed tokens) of each request
BATCHES = {
    "one tree": [(8, 8, 100)],
    "plain decode": [(1, 1, 5), (1, 1, 900)],
    "mixed": [(1, 1, 3), (130, 1, 64), (8, 8, 2**20), (5, 1, 0), (3, 3, 0), (1, 1, 17)],
    "rows before the tree": [(20, 4, 50), (8, 8, 33)],
    "large trees": [(71, 71, 9), (70, 70, 800)],
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("budget", "num_axes"), [(7, 3), (70, 3), (31, 4)])
def test_nodes_stand_at_their_depth_on_every_axis(
    batch: list[tuple[int, int, int]], budget: int, num_axes: int
) -> None:
    batch = [(q, min(n, budget + 1), c) for q, n, c in batch]
    rng = np.random.default_rng(budget)
    device = torch.get_default_device()
    trees, rows = random_trees(budget, rng), RowBuffers(MAX_ROWS, MAX_REQS, budget, device)
    indices = torch.tensor(rng.permutation(MAX_REQS)[: len(batch)])
    lens = [query_len for query_len, _, _ in batch]
    starts = torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32)
    logits = torch.tensor(np.cumsum([0] + [n for _, n, _ in batch]), dtype=torch.int32)
    layout = Layout(indices, starts, logits)
    prepare_rows(
        trees,
        rows,
        Paths.empty(MAX_REQS, 1, MAX_ROWS, device),
        layout,
        torch.tensor([c + q for q, _, c in batch], dtype=torch.int32),
        torch.cat([torch.arange(c, c + q) for q, _, c in batch]),
        num_reqs_padded=len(batch),
        num_tokens_padded=sum(lens),
        max_query_len=max(lens),
    )
    deltas = torch.tensor(rng.integers(-60, 60, MAX_REQS), dtype=torch.int32)
    # As vLLM has filled them for a chain; the rows of prompts, roots among them, are arbitrary.
    before = torch.tensor(rng.integers(0, 2**21, (num_axes, MAX_ROWS + 1)))
    expected = before.clone()
    for req, (query_len, n, computed) in enumerate(batch):
        if n == 1:
            continue
        for row in range(1, n):
            depth = int(trees.depths[indices[req], row])
            position = computed + query_len - n + depth + int(deltas[indices[req]])
            expected[:, int(starts[req + 1]) - n + row] = position
    positions = before.clone()
    place_nodes(rows, layout, deltas, positions, budget + 1)
    assert torch.equal(positions, expected)


def test_a_step_whose_rows_were_not_filled() -> None:
    """Trees of an earlier step that are longer than the step's requests: nothing outside them."""
    rows = RowBuffers(MAX_ROWS, MAX_REQS, 31, torch.get_default_device())
    rows.tail_lens.fill_(32)
    starts = torch.tensor([3, 5, 6], dtype=torch.int32)
    positions = torch.full((3, MAX_ROWS), -1)
    deltas = torch.zeros(MAX_REQS, dtype=torch.int32)
    place_nodes(rows, Layout(torch.tensor([0, 1]), starts, starts), deltas, positions, 32)
    assert (positions[:, :4] == -1).all() and (positions[:, 6:] == -1).all()
