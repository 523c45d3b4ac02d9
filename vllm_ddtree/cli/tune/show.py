# SPDX-License-Identifier: Apache-2.0
"""`tune` in tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_ddtree.cli.tune.advise import lengths, rates
from vllm_ddtree.cli.tune.costs import Costs
from vllm_ddtree.cli.tune.seen import FEW, Seen


def as_json(seen: Seen, costs: Costs, spec: dict[str, Any]) -> str:
    """All numbers."""
    return json.dumps(
        {
            "rounds": seen.rounds,
            "nodes": seen.nodes,
            "reached_by_depth": seen.reached,
            "accepted_by_depth": seen.depths,
            "accepted_by_rank": seen.ranks,
            "acceptance_length": lengths(seen),
            "standard_error": {str(budget): error for budget, error in seen.errors.items()},
            "tokens_per_second": {
                str(requests): {rate.kind: rate.tokens for rate in rates(seen, costs, requests)}
                for requests in costs
            },
            "speculative_config": spec,
        },
        indent=2,
    )


def show(seen: Seen, costs: Costs, spec: dict[str, Any], console: Console) -> None:
    """Tables, then the settings."""
    console.print(f"{seen.rounds} rounds with trees of {seen.nodes} nodes")
    if seen.rounds < FEW:
        console.print(f"These are few: with {FEW} or more the numbers hold better.")
    for table in (by_depth(seen), by_rank(seen), by_budget(seen), *by_load(seen, costs)):
        console.print()
        console.print(table)
    console.print()
    if not spec:
        console.print("Plain decoding is faster at every load: leave --speculative-config out.")
        return
    console.print("Settings:")
    # One line, whatever the terminal's width: it is there to be pasted.
    print(f"--speculative-config '{json.dumps(spec)}'")
    if not costs:
        console.print("Costs are not known (--costs): the engine chooses the budget by load.")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=len(title), box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def by_depth(seen: Seen) -> Table:
    """How often a node was accepted, given the one before."""
    table = _table("Acceptance by depth", "depth", "reached", "accepted", "share")
    for depth, (reached, accepted) in enumerate(zip(seen.reached, seen.depths, strict=True), 1):
        table.add_row(f"{depth}", f"{reached}", f"{accepted}", f"{accepted / reached:.2f}")
    return table


def by_rank(seen: Seen) -> Table:
    """Which candidates the accepted nodes were."""
    table = _table("Accepted nodes by rank", "rank", "accepted", "share")
    total = sum(seen.ranks)
    for rank, accepted in enumerate(seen.ranks):
        table.add_row(f"{rank}", f"{accepted}", f"{accepted / total:.3f}")
    return table


def by_budget(seen: Seen) -> Table:
    """Acceptance lengths."""
    table = _table("Acceptance length by budget", "budget", "tokens a round", "+-")
    for budget in seen.accepted:
        table.add_row(f"{budget}", f"{seen.length(budget):.2f}", f"{seen.errors[budget]:.2f}")
    for chain, mean in seen.chains.items():
        table.add_row(f"chain of {chain}", f"{1 + mean:.2f}", "")
    return table


def by_load(seen: Seen, costs: Costs) -> Iterator[Table]:
    """Tokens a second, a column a number of requests."""
    if not costs:
        return
    counts = list(costs)
    table = _table("Tokens a second by requests", "budget", *map(str, counts))
    found = {
        count: {rate.kind: rate.tokens for rate in rates(seen, costs, count)} for count in counts
    }
    for kind in lengths(seen):
        row = [found[count].get(kind) for count in counts]
        if any(row):
            words = (
                ""
                if tokens is None
                else f"[bold]{tokens:.0f}[/]"
                if tokens == max(found[count].values())
                else f"{tokens:.0f}"
                for count, tokens in zip(counts, row, strict=True)
            )
            table.add_row(kind, *words)
    yield table
