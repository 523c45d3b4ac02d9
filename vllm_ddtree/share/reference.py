# SPDX-License-Identifier: Apache-2.0
"""Sharing on paper: what a claim is worth, and which nodes are the best of all.

A node's claim is its path probability in 1 / `ONE`. Drafters are wrong about themselves, by depth
and by how sure they are: a claim of one half may be right three times in four at depth 1, and once
in three at depth 8. Requests can be compared only by what their claims have been worth.

The oracle for `calibration.py` and `nodes.py`, which must agree with it bit for bit.
"""

from __future__ import annotations

import torch

from vllm_ddtree.round.meter import ONE

DEPTHS = 32
BINS = 41
"""Ranges of claims, two for each power of two: bin 2 b holds the claims from 2^b on, bin 2 b + 1
those from 1.5 * 2^b on."""
WORTH = 1 << 16
"""Worth of a claim that is right as often as it says."""
PRIOR = 16 * ONE
"""What is claimed before what is seen counts as much as what is known of more claims together."""
WINDOW = 4096
"""Rounds (of one request) after which the counts are halved, because texts change."""


def bin_of(claims: torch.Tensor) -> torch.Tensor:
    """Bin of each claim, int64; 0 of what claims nothing."""
    power = claims.clamp(min=1).double().log2().floor().long()
    return 2 * power + (2 * claims >= 3 << power)


def worths(counts: torch.Tensor) -> torch.Tensor:
    """What claims have been worth by depth and bin, in 1 / `WORTH`.

    That is accepted over claimed. A bin with little behind it is taken for one of its depth, and a
    depth with little behind it for one of all.

    Args:
        counts: int64 [2, DEPTHS, BINS], claims summed, then nodes accepted. Row 0, the roots, is
            left out.

    Returns:
        int64 [DEPTHS, BINS].

    """
    claimed, accepted = counts[0, 1:], counts[1, 1:] * ONE

    def rate(accepted: torch.Tensor, claimed: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        return (accepted * WORTH + PRIOR * known) // (claimed + PRIOR)

    of_all = rate(accepted.sum(), claimed.sum(), torch.tensor(WORTH))
    of_depth = rate(accepted.sum(1), claimed.sum(1), of_all)
    found = torch.full(counts.shape[1:], WORTH)
    found[1:] = rate(accepted, claimed, of_depth[:, None])
    return found


def chances(claims: torch.Tensor, depths: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
    """How likely nodes are accepted, in 1 / `ONE`: their claims, calibrated.

    Args:
        claims: int [...], 0 of what is no node.
        depths: int [...].
        worth: int64 [DEPTHS, BINS], of `worths`.

    Returns:
        int64 [...].

    """
    value = claims.long() * worth[depths.long(), bin_of(claims)] // WORTH
    return value.clamp(max=ONE)


def share_nodes(chances: torch.Tensor, capacities: torch.Tensor, total: int) -> torch.Tensor:
    """Nodes that each of R requests verifies, `total` in all: the best of the batch.

    A request's nodes are taken in the order in which its tree grew, so none is worth more than one
    before it. Of equal nodes the first request's come first.

    Args:
        chances: int64 [R, M], by request and node, in the order of the tree.
        capacities: int [R], most nodes of each request.
        total: at most the sum of `capacities`.

    Returns:
        int64 [R].

    """
    num_reqs, most = chances.shape
    levels = chances.cummin(dim=1).values
    levels = levels.masked_fill(torch.arange(most) >= capacities[:, None], -1)
    best = levels.flatten().argsort(descending=True, stable=True)[:total]
    return torch.bincount(best // most, minlength=num_reqs)
