# SPDX-License-Identifier: Apache-2.0
"""What rounds take: a JSON file, or the log of a server that has measured them.

The JSON file is {requests: {nodes: milliseconds}}; "chain of 15" may stand among the nodes. An
engine with `"budget": "auto"` logs the same at start, in lines that this module reads.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

LINE = re.compile(r"ddtree: (\d+) requests, ms a round by budget: (.*)")
ENTRY = re.compile(r"(chain of \d+|\d+) (\d+(?:\.\d+)?)(?=,|\s|$)")

Costs = dict[int, dict[str, float]]
"""Milliseconds by running requests, and by nodes or "chain of n"."""


def read_costs(path: Path) -> Costs:
    """Read either kind of file.

    Raises:
        ValueError: it is none of them.

    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"--costs {path}: {error.strerror}") from error
    try:
        found = _of_json(json.loads(text))
    except (ValueError, TypeError, AttributeError):
        found = _of_log(text)
    if not found:
        raise ValueError(
            f'--costs {path}: give JSON such as {{"1": {{"0": 5.4, "31": 9.2}}}} (requests, nodes, '
            "milliseconds), or the log of a server that was started with budget auto on a GPU"
        )
    return found


def _of_json(given: dict[str, dict[str, float]]) -> Costs:
    found: Costs = {}
    for requests, times in given.items():
        own = {str(nodes): float(ms) for nodes, ms in times.items()}
        right = all(ms > 0 and re.fullmatch(r"(chain of )?\d+", nodes) for nodes, ms in own.items())
        if int(requests) < 1 or not right:
            raise ValueError
        found[int(requests)] = own
    return dict(sorted(found.items()))


def _of_log(text: str) -> Costs:
    """The last time each line was said. Drafts with few masks are left out."""
    found: Costs = {}
    for line in LINE.finditer(text):
        entries = line.group(2).split(", ")
        times = [ENTRY.fullmatch(entry.strip()) for entry in entries]
        own = {match.group(1): float(match.group(2)) for match in times if match}
        if own:
            found[int(line.group(1))] = own
    return dict(sorted(found.items()))


def cost_of(costs: Costs, kind: str, requests: int) -> float | None:
    """Milliseconds of a round, on the line between the two nearest numbers of requests.

    Fewer requests than any known take as long as the fewest. None: not known for so many.
    """
    known = [(count, times[kind]) for count, times in costs.items() if kind in times]
    if not known or requests > known[-1][0]:
        return None
    if requests <= known[0][0]:
        return known[0][1]
    for (low, below), (high, above) in itertools.pairwise(known):
        if low <= requests <= high:
            return below + (above - below) * (requests - low) / (high - low)
    raise AssertionError("the counts are ascending")
