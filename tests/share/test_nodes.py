# SPDX-License-Identifier: Apache-2.0
"""The kernel's shares are those of the reference, and the reference's are the best there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.share.cases import random_trees
from vllm_ddtree.round.meter import ONE
from vllm_ddtree.share import nodes as kernel
from vllm_ddtree.share.calibration import LANES
from vllm_ddtree.share.nodes import Shares
from vllm_ddtree.share.reference import BINS, DEPTHS, WORTH, chances, share_nodes


def random_worth(rng: np.random.Generator) -> torch.Tensor:
    """int64 [32, 64], from a third to three times what is claimed."""
    return torch.from_numpy((WORTH * 3.0 ** rng.uniform(-1, 1, (DEPTHS, LANES))).astype(np.int64))


@pytest.mark.parametrize("seed", range(60))
def test_shares_are_the_references(seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    num_reqs, budget = int(rng.integers(1, 20)), int(rng.choice([1, 2, 7, 15, 31, 40, 255]))
    monkeypatch.setattr(kernel, "ELEMENTS", int(rng.choice([64, 512, 8192])))  # requests in parts
    trees, indices = random_trees(rng, num_reqs, budget, device, int(rng.choice([2, 64, ONE])))
    capacities = torch.from_numpy(rng.integers(1, budget + 1, num_reqs).astype(np.int32))
    if rng.integers(2):
        capacities[:] = budget
    most = int(capacities.sum())
    total = int(rng.choice([0, 1, num_reqs // 2, min(num_reqs, most), most // 2, most]))
    worth = random_worth(rng).to(device)

    shares = Shares(num_reqs + 5, budget, device)
    shares.nodes.fill_(-7)
    shares.assign(trees, worth, indices, capacities.to(device), total)

    claims, depths = trees.claims[indices, 0, 1:].cpu(), trees.depths[indices, 1:].cpu()
    found = chances(claims, depths, worth[:, :BINS].cpu())
    expected = share_nodes(found, capacities, total)
    assert shares.nodes[:num_reqs].tolist() == expected.tolist()
    assert shares.nodes[num_reqs:].tolist() == [-7] * 5
    assert sum(expected.tolist()) == total
    ends = [0, *np.cumsum(expected.numpy() + 1).tolist()]
    assert shares.starts.tolist() == ends + [total + num_reqs] * 5


@pytest.mark.parametrize("seed", range(30))
def test_no_other_shares_are_worth_more(seed: int) -> None:
    """All ways of sharing are tried, where chances fall along each tree."""
    rng = np.random.default_rng(seed)
    levels = int(rng.choice([3, 1000]))
    values = np.sort(rng.integers(1, levels + 1, (3, 5)), axis=1)[:, ::-1]
    capacities, total = rng.integers(0, 6, 3), 6
    total = int(min(total, capacities.sum()))
    shares = share_nodes(torch.from_numpy(values.copy()), torch.from_numpy(capacities), total)
    worth = [np.concatenate(([0], np.cumsum(row))) for row in values]
    ways = [
        way
        for way in itertools.product(*(range(cap + 1) for cap in capacities))
        if sum(way) == total
    ]
    best = max(sum(int(worth[r][k]) for r, k in enumerate(way)) for way in ways)
    assert sum(int(worth[r][k]) for r, k in enumerate(shares.tolist())) == best


def test_equal_nodes_go_to_the_first_requests() -> None:
    chances = torch.full((4, 3), 5)
    assert share_nodes(chances, torch.tensor([3, 2, 3, 3]), 6).tolist() == [3, 2, 1, 0]


def test_a_node_is_worth_no_more_than_one_before_it() -> None:
    """A promising node behind a poor one is not reached for its own sake."""
    chances = torch.tensor([[5, 1, 9], [4, 3, 2]])
    assert share_nodes(chances, torch.tensor([3, 3]), 4).tolist() == [1, 3]


def test_too_many_requests_are_refused(device: str) -> None:
    trees, indices = random_trees(np.random.default_rng(0), 3, 7, device)
    capacities = torch.full((3,), 7, dtype=torch.int32, device=device)
    worth = torch.full((DEPTHS, LANES), WORTH, device=device)
    with pytest.raises(ValueError, match="a batch of 3 requests exceeds the buffers \\(2\\)"):
        Shares(2, 7, device).assign(trees, worth, indices, capacities, 5)
