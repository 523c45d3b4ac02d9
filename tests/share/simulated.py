# SPDX-License-Identifier: Apache-2.0
"""Rounds of many requests that differ in how well the drafter knows their texts, as numbers alone.

Every request has a sureness of its own that moves from round to round. A drafted position's best
candidate has that chance, falling with depth, and each further one a share of what is left. The
target's token is drawn from what the drafter would say if it knew itself: it claims too little, or
too much, by depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_ddtree.round.meter import ONE
from vllm_ddtree.share.reference import BINS, DEPTHS, bin_of, chances, share_nodes, worths
from vllm_ddtree.tree.reference import accepted_path, build_tree

DEPTH, TOP_K = 8, 8
KEPT = 0.65
"""Of a request's sureness from one round to the next."""


class Way(NamedTuple):
    """How the requests of a batch get their nodes."""

    mean: int
    """Nodes of a request, on average."""
    how: str = "shared"
    """"alike", "shared", or shared by "claims" as the drafter has them."""


class Requests:
    """Requests that decode for ever.

    Args:
        num_reqs: requests.
        budget: nodes of each one's tree.
        bias: float [DEPTH], the power to which a candidate's chance is taken to be the true one:
            below 1 the drafter claims too little.
        seed: of all that is random.

    """

    def __init__(self, num_reqs: int, budget: int, bias: np.ndarray, seed: int) -> None:
        self.num_reqs, self.budget, self._bias = num_reqs, budget, bias
        self._rng = np.random.default_rng(seed)
        self._sure = self._rng.normal(0.0, 1.0, num_reqs)

    def rounds(self) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
        """Claims and depths, int64 [num_reqs, budget], and the nodes on each true path."""
        rng = self._rng
        moved = rng.normal(0.0, (1 - KEPT**2) ** 0.5, self.num_reqs)
        self._sure = KEPT * self._sure + moved
        claims = torch.zeros(self.num_reqs, self.budget, dtype=torch.int64)
        depths = torch.ones(self.num_reqs, self.budget, dtype=torch.int64)
        paths = []
        for request, sure in enumerate(self._sure):
            noise = rng.normal(0.0, 1.5, DEPTH)
            best = 1 / (1 + np.exp(-(1.2 + 1.6 * sure + noise - 0.05 * np.arange(DEPTH))))
            ranks = rng.geometric(best**self._bias) - 1
            log_probs = np.log(best)[:, None] + np.arange(TOP_K) * np.log1p(-best)[:, None]
            ids = np.tile(np.arange(TOP_K), (DEPTH, 1))
            tree = build_tree(log_probs.astype(np.float32), ids, self.budget)
            size = tree.num_nodes
            claims[request, :size] = (torch.from_numpy(tree.scores[1:].copy()).exp() * ONE).long()
            depths[request, :size] = torch.from_numpy(tree.depths[1:].copy()).long()
            paths.append(accepted_path(tree, np.append(ranks, -1)[tree.depths])[0])
        return claims, depths, paths


def tokens(requests: Requests, steps: int, ways: Sequence[Way]) -> dict[Way, float]:
    """Tokens of a round, on average, each way in the same rounds."""
    total = dict.fromkeys(ways, 0)
    counts = {way: torch.zeros(2, DEPTHS, BINS, dtype=torch.int64) for way in ways}
    most = torch.full((requests.num_reqs,), requests.budget)
    for _ in range(steps):
        claims, depths, paths = requests.rounds()
        for way in ways:
            shares = torch.full((requests.num_reqs,), way.mean)
            if way.how != "alike":
                worth = worths(counts[way])
                value = claims if way.how == "claims" else chances(claims, depths, worth)
                shares = share_nodes(value, most, way.mean * requests.num_reqs)
            for request, nodes in enumerate(shares.tolist()):
                accepted = [row for row in paths[request] if row <= nodes]
                total[way] += 1 + len(accepted)
                own = claims[request, :nodes]
                cells = (depths[request, :nodes], bin_of(own))
                seen = torch.zeros(nodes, dtype=torch.int64)
                seen[torch.tensor(accepted, dtype=torch.int64) - 1] = 1
                counts[way][0].index_put_(cells, own, accumulate=True)
                counts[way][1].index_put_(cells, seen, accumulate=True)
    return {way: total[way] / (steps * requests.num_reqs) for way in ways}
