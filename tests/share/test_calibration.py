# SPDX-License-Identifier: Apache-2.0
"""Claims are worth what they have been worth: the counts, the kernel, and a simulated truth."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.share.cases import random_trees
from vllm_ddtree.round.meter import ONE
from vllm_ddtree.round.paths import Paths
from vllm_ddtree.share.calibration import LANES, Calibration
from vllm_ddtree.share.reference import (
    BINS,
    DEPTHS,
    PRIOR,
    WINDOW,
    WORTH,
    bin_of,
    chances,
    worths,
)


def random_paths(rng: np.random.Generator, parents: list[list[int]], device: str) -> Paths:
    """A path of each tree, from the root down to any row."""
    paths = Paths.empty(len(parents), 31, 8, device)
    for place, tree in enumerate(parents):
        row = int(rng.integers(len(tree)))
        path: list[int] = []
        while row >= 0:
            path.insert(0, row)
            row = tree[row]
        path = path[:32]
        paths.rows[place, : len(path)] = torch.tensor(path, dtype=torch.int32)
        paths.lens[place] = len(path)
    return paths


@pytest.mark.parametrize("seed", range(20))
def test_counts(seed: int, device: str) -> None:
    """Of the rows that were verified, and of no others; a round without nodes counts, too."""
    rng = np.random.default_rng(seed)
    num_reqs, budget = int(rng.integers(1, 9)), int(rng.choice([1, 7, 33]))
    trees, indices = random_trees(rng, num_reqs, budget, device)
    num_rows = rng.integers(0, budget + 2, num_reqs)  # 0: no tree
    parents = [
        trees.parents[index, : max(1, rows)].tolist()
        for index, rows in zip(indices.tolist(), num_rows, strict=True)
    ]
    # Rows that are no nodes have no parent, and lead nowhere.
    paths = random_paths(rng, [[-1, *(p for p in t[1:] if p >= 0)] for t in parents], device)
    calibration = Calibration(device)
    rows = torch.from_numpy(num_rows.astype(np.int32)).to(device)
    for _ in range(2):
        calibration.observe(trees, indices, rows, paths)

    expected = torch.zeros(2, DEPTHS, LANES, dtype=torch.int64)
    for place, (index, size) in enumerate(zip(indices.tolist(), num_rows, strict=True)):
        path = paths.rows[place, 1 : int(paths.lens[place])].tolist()
        for row in range(size):
            claim, depth = int(trees.claims[index, 0, row]), int(trees.depths[index, row])
            if row and not claim:
                continue
            cell = (depth, int(bin_of(torch.tensor(claim))))
            expected[0][cell] += 2 * claim
            expected[1][cell] += 2 * (row in path)
    assert torch.equal(calibration.counts.cpu(), expected)


@pytest.mark.parametrize("seed", range(20))
def test_worth_is_the_references(seed: int, device: str) -> None:
    rng = np.random.default_rng(seed)
    calibration = Calibration(device)
    size = int(rng.choice([1, 100, 100_000]))
    claimed = rng.integers(0, size * ONE, (DEPTHS, BINS)) * rng.integers(0, 2, (DEPTHS, BINS))
    claimed[0] = 0
    claimed[0, -1] = int(rng.integers(0, 2 * WINDOW)) * ONE
    counts = torch.from_numpy(np.stack([claimed, rng.integers(0, size, (DEPTHS, BINS))]))
    calibration.counts[:, :, :BINS] = counts.to(device)
    calibration.refresh()
    assert torch.equal(calibration.worth[:, :BINS].cpu(), worths(counts))
    many = claimed[0, -1] >= WINDOW * ONE
    assert torch.equal(calibration.counts[:, :, :BINS].cpu(), counts // 2 if many else counts)


def test_worth_is_accepted_over_claimed() -> None:
    """Up to the prior, in exact numbers."""
    counts = torch.zeros(2, DEPTHS, BINS, dtype=torch.int64)
    assert (worths(counts) == WORTH).all()
    counts[0, 3, 38], counts[1, 3, 38] = 100 * ONE, 150
    found = worths(counts)
    first = Fraction(150 * ONE * WORTH + PRIOR * WORTH, 100 * ONE + PRIOR)
    assert found[9, 4] == found[9, 38] == int(first), "as of all depths"
    second = Fraction(150 * ONE * WORTH + PRIOR * int(first), 100 * ONE + PRIOR)
    assert found[3, 4] == int(second), "as of its depth"
    third = Fraction(150 * ONE * WORTH + PRIOR * int(second), 100 * ONE + PRIOR)
    assert found[3, 38] == int(third)
    assert abs(found[3, 38] / WORTH - 1.5) < 0.01


def test_bins_are_powers_of_two_and_what_lies_half_way() -> None:
    claims = torch.tensor([0, 1, 2, 3, 4, 5, 6, ONE // 2 - 1, ONE // 2, 3 * ONE // 4 - 1, ONE - 1])
    assert bin_of(claims).tolist() == [0, 0, 2, 3, 4, 4, 5, 37, 38, 38, 39]
    assert int(bin_of(torch.tensor(ONE))) == BINS - 1


class Drafter:
    """Rounds whose claims are wrong by depth and by size, as `truth` says."""

    def __init__(self, power: float, by_depth: float, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._power, self._by_depth = power, by_depth

    def truth(self, claims: np.ndarray, depths: np.ndarray) -> np.ndarray:
        return np.minimum(1.0, (claims / ONE) ** self._power * self._by_depth ** (depths - 1))

    def nodes(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Claims and depths; deep nodes claim less."""
        depths = self._rng.integers(1, 12, count)
        claims = ONE * self._rng.beta(2, 1 + 0.5 * depths)
        return np.maximum(1, claims.astype(np.int64)), depths

    def count(self, calibration: torch.Tensor, count: int) -> None:
        """Add so many verified nodes to the counts."""
        claims, depths = self.nodes(count)
        seen = self._rng.random(count) < self.truth(claims, depths)
        bins = bin_of(torch.from_numpy(claims)).numpy()
        np.add.at(calibration[0].numpy(), (depths, bins), claims)
        np.add.at(calibration[1].numpy(), (depths, bins), seen)

    def error(self, calibration: torch.Tensor) -> tuple[float, float]:
        """Mean error of claims, and of what they are worth."""
        claims, depths = self.nodes(20_000)
        found = chances(torch.from_numpy(claims), torch.from_numpy(depths), worths(calibration))
        truth = self.truth(claims, depths)
        return (
            float(np.abs(claims / ONE - truth).mean()),
            float(np.abs(found.numpy() / ONE - truth).mean()),
        )


@pytest.mark.parametrize(("power", "by_depth"), [(0.6, 1.0), (1.0, 0.85), (0.7, 0.92), (1.5, 1.05)])
def test_a_drafter_that_is_wrong_about_itself(power: float, by_depth: float) -> None:
    """500 rounds of 15 nodes take at least half of the error away."""
    drafter = Drafter(power, by_depth, seed=1)
    counts = torch.zeros(2, DEPTHS, BINS, dtype=torch.int64)
    drafter.count(counts, 500 * 15)
    claimed, calibrated = drafter.error(counts)
    assert calibrated < claimed / 2


def test_a_drafter_that_is_right_stays_so() -> None:
    """A few rounds say little, and change little."""
    drafter = Drafter(1.0, 1.0, seed=2)
    counts = torch.zeros(2, DEPTHS, BINS, dtype=torch.int64)
    for _ in range(20):
        drafter.count(counts, 15)
        claimed, calibrated = drafter.error(counts)
        assert claimed < 1e-6 and calibrated < 0.08
    drafter.count(counts, 500 * 15)
    assert drafter.error(counts)[1] < 0.03


def test_old_rounds_fade(device: str) -> None:
    """Three windows after the texts have changed, next to nothing of the old ones is left."""
    calibration = Calibration(device)
    old, new = Drafter(0.6, 1.0, seed=3), Drafter(1.4, 1.0, seed=4)
    for drafter, windows in ((old, 4), (new, 3)):
        for _ in range(8 * windows):
            step = torch.zeros(2, DEPTHS, BINS, dtype=torch.int64)
            drafter.count(step, WINDOW // 8 * 3)
            step[0, 0, -1] = WINDOW // 8 * ONE
            calibration.counts[:, :, :BINS] += step.to(device)
            calibration.refresh()
    claimed, calibrated = new.error(calibration.counts[:, :, :BINS].cpu())
    assert calibrated < claimed / 4
