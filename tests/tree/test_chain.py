# SPDX-License-Identifier: Apache-2.0
"""A tree that is turned into a chain stays inside the rows it was given."""

import pytest
import torch

from vllm_ddtree.round.layout import Layout
from vllm_ddtree.round.trees import TreeBuffers
from vllm_ddtree.tree.chain import as_chains

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("budget", [1, 3, 7, 8, 20, 63])
@pytest.mark.parametrize("depth", [1, 7, 15])
def test_rows_become_chains(budget: int, depth: int) -> None:
    torch.manual_seed(budget + depth)
    trees = TreeBuffers(6, budget, DEVICE)
    trees.chains.copy_(torch.randint(100, 200, trees.chains.shape))
    trees.parents.fill_(77)
    trees.depths.fill_(77)
    trees.masks[:, 1:] = 77
    trees.chain_only[2] = 1  # a chain already
    indices = [4, 2, 0, 5, -1]
    rows = [budget + 1, budget + 1, 1, min(budget, 5) + 1, budget + 1]  # index 0: no drafts
    before = [0, 0, 3, 2, 0]  # query rows before the tree's
    starts = [0]
    for number, more in zip(rows, before, strict=True):
        starts.append(starts[-1] + number + more)
    cu = torch.tensor([0, *rows]).cumsum(0)

    def put(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=DEVICE)

    ids = put(torch.arange(starts[-1] + 4))
    as_chains(trees, Layout(put(indices, torch.int64), put(starts), put(cu)), ids, depth)
    expected = list(range(starts[-1] + 4))
    parents = torch.full((6, budget + 1), 77)
    depths = parents.clone()
    masks = {(i, row): 77 for i in range(6) for row in range(1, budget + 1)}
    for request in (0, 3):
        index, number = indices[request], rows[request]
        root = starts[request + 1] - number
        for row in range(1, number):
            on_chain = row <= depth
            parents[index, row] = row - 1 if on_chain else -1
            depths[index, row] = row if on_chain else 1
            masks[index, row] = (2 << row) - 1 if on_chain else 1 | 1 << row
            if on_chain:
                expected[root + row] = int(trees.chains[index, row - 1])
    assert ids.tolist() == expected
    assert torch.equal(trees.parents.cpu().long(), parents)
    assert torch.equal(trees.depths.cpu().long(), depths)
    for (index, row), mask in masks.items():
        words = [word & 0xFFFFFFFF for word in trees.masks[index, row].tolist()]
        if mask == 77:
            assert words == [77] * trees.num_words
        else:
            assert sum(word << 32 * i for i, word in enumerate(words)) == mask
