# SPDX-License-Identifier: Apache-2.0
"""Budgets from acceptance and costs: the most tokens a second at each number of requests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from vllm_ddtree.cli.tune.costs import Costs, cost_of
from vllm_ddtree.cli.tune.seen import FEW, Seen

MARGIN = 1.02
"""A budget replaces that of one request fewer if it gives more by this factor, as in an engine."""


@dataclass(frozen=True)
class Rate:
    """Tokens a second of all requests together."""

    requests: int
    kind: str
    """Nodes, or "chain of n"."""
    length: float
    """Acceptance length."""
    ms: float
    tokens: float


def lengths(seen: Seen) -> dict[str, float]:
    """Acceptance length by kind of round: budgets in nodes, then chains."""
    trees = {str(budget): seen.length(budget) for budget in seen.accepted}
    return trees | {f"chain of {chain}": 1.0 + mean for chain, mean in seen.chains.items()}


def rates(seen: Seen, costs: Costs, requests: int) -> list[Rate]:
    """What is known at a number of running requests, the best first."""
    found = []
    for kind, length in lengths(seen).items():
        ms = cost_of(costs, kind, requests)
        if ms is not None:
            found.append(Rate(requests, kind, length, ms, 1e3 * requests * length / ms))
    return sorted(found, key=lambda rate: -rate.tokens)


def schedule(seen: Seen, costs: Costs) -> list[tuple[int, int, int]]:
    """(first, last, budget) for ranges of running requests, of trees and plain decoding."""
    best: list[int] = []
    for requests in range(1, max(costs, default=0) + 1):
        trees = {int(r.kind): r.tokens for r in rates(seen, costs, requests) if r.kind.isdecimal()}
        if not trees:
            break
        top = max(trees, key=lambda budget: trees[budget])
        before = best[-1] if best else None
        if before in trees and trees[top] < MARGIN * trees[before]:
            top = before
        best.append(top)
    ranges = []
    for budget, group in itertools.groupby(enumerate(best, 1), key=lambda entry: entry[1]):
        members = [requests for requests, _ in group]
        ranges.append((members[0], members[-1], budget))
    return ranges


def settings(seen: Seen, costs: Costs, drafter: str, top_k: int | None) -> dict[str, Any]:
    """A speculative_config to paste.

    Args:
        seen: of the trace.
        costs: empty: not known, so the engine chooses by itself.
        drafter: a folder or a hub name.
        top_k: candidates of the trace's engine; fewer are named if they keep what was accepted.
            None: the drafter fixes them.

    """
    found: dict[str, Any] = {"method": "ddtree", "model": drafter}
    ranges = schedule(seen, costs)
    if not ranges:
        found["budget"] = "auto"
    elif len(ranges) == 1 and ranges[0][2] > 0:
        found["budget"] = ranges[0][2]
    elif any(budget for _, _, budget in ranges):
        found["budget_per_batch_size"] = [list(each) for each in ranges]
    else:
        return {}  # plain decoding is faster at every load
    if top_k is not None and seen.rounds >= FEW and seen.top_k() < top_k:
        found["top_k"] = seen.top_k()
    return found
