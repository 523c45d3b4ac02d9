# SPDX-License-Identifier: Apache-2.0
"""Which method to use, by the tokens a second that each gave at the loads measured.

A server has one setting for all its loads. So settings are compared by their mean over the loads,
as ratios: twice as fast at one load makes up for half as fast at another. Where trees of several
fixed budgets were measured, a schedule that takes the best of them at each load is a setting, too.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from vllm_ddtree.cli.bench.methods import fixed_budget, is_method, speculation
from vllm_ddtree.cli.bench.record import Results

MARGIN = 1.02
"""By how much a setting must be better: less is noise."""
AUTO = "tree-auto"
SCHEDULE = "budgets by load"


@dataclass(frozen=True)
class Advice:
    """What to use."""

    name: str
    """A method, or `SCHEDULE`."""
    spec: dict[str, Any] | None
    """Its speculative_config; None for plain decoding, or where it is not known."""
    known: bool
    """Whether the configuration is known."""
    gain: float | None
    """Mean over the loads of its tokens a second over those of plain decoding."""
    best: dict[int, str]
    """The fastest method at each load."""

    def line(self) -> str:
        """For the command line of `vllm serve`."""
        if not self.known:
            return f"use {self.name} (give TARGET and DRAFTER, too, for its --speculative-config)"
        if self.spec is None:
            return "leave --speculative-config out"
        return f"--speculative-config '{json.dumps(self.spec)}'"


def recommend(results: Results, drafter: str | None, chain_method: str) -> Advice | None:
    """The setting with the best mean; None if no method ran at every load.

    Args:
        results: at least one run.
        drafter: a folder or a hub name, None: not known.
        chain_method: vLLM's own method for it.

    """
    loads = results.loads
    speeds: dict[str, list[float]] = {}
    for name in results.names:
        own = [results.median(name, load) for load in loads]
        if all(own):
            speeds[name] = [speed for speed in own if speed is not None]
    if not speeds:
        return None
    best = {
        load: max(speeds, key=lambda name, place=place: speeds[name][place])  # type: ignore[misc]
        for place, load in enumerate(loads)
    }
    settings = dict(speeds)
    ranges = budgets_by_load(speeds, loads)
    if len({nodes for _, _, nodes in ranges}) > 1:
        fixed = [own for name, own in speeds.items() if fixed_budget(name) is not None]
        settings[SCHEDULE] = [max(own[place] for own in fixed) for place in range(len(loads))]
    chosen = max(settings, key=lambda name: _mean(settings[name]))
    # What follows the load by itself goes before, then what is one number.
    for other in (AUTO, *speeds):
        if other in settings and MARGIN * _mean(settings[other]) >= _mean(settings[chosen]):
            if other == AUTO or chosen == SCHEDULE:
                chosen = other
            break
    spec: dict[str, Any] | None = None
    known = chosen == "plain"
    if drafter is not None and chosen == SCHEDULE:
        spec = {"method": "ddtree", "model": drafter}
        spec["budget_per_batch_size"] = [list(each) for each in ranges]
        known = True
    elif drafter is not None and is_method(chosen):
        spec, known = speculation(chosen, drafter, chain_method), True
    plain = speeds.get("plain")
    gain = _mean(settings[chosen]) / _mean(plain) if plain else None
    return Advice(chosen, spec, known, gain, best)


def budgets_by_load(speeds: dict[str, list[float]], loads: list[int]) -> list[tuple[int, int, int]]:
    """(first, last, nodes) for ranges of running requests: the fastest fixed budget of each.

    A range ends halfway, as a ratio, between two loads.
    """
    fixed = {
        nodes: own for name, own in speeds.items() if (nodes := fixed_budget(name)) is not None
    }
    if not any(fixed):
        return []
    ranges: list[tuple[int, int, int]] = []
    first = 1
    for place, load in enumerate(loads):
        nodes = max(fixed, key=lambda budget: fixed[budget][place])
        last = int(math.sqrt(load * loads[place + 1])) if place + 1 < len(loads) else load
        if ranges and ranges[-1][2] == nodes:
            ranges[-1] = (ranges[-1][0], last, nodes)
        else:
            ranges.append((first, last, nodes))
        first = last + 1
    return ranges


def _mean(values: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values)) / len(values))
