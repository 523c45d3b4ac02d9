# SPDX-License-Identifier: Apache-2.0
"""Load that changes while it runs: phases of so many requests of some traffic, and what each
second of them gave.

The loop is closed: a phase keeps its number of requests in flight. Where the next phase has fewer,
the others end first; where it has more, the missing ones are submitted at once.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Phase:
    """A part of a changing load."""

    seconds: float
    requests: int
    traffic: str = ""

    def __str__(self) -> str:
        return f"{self.seconds:g}:{self.requests}" + (f":{self.traffic}" if self.traffic else "")


def parse_phase(text: str) -> Phase:
    """The phase that SECONDS:REQUESTS or SECONDS:REQUESTS:TRAFFIC names.

    Raises:
        ValueError: it names none.

    """
    seconds, requests, traffic = [*text.split(":"), ""][:3]
    phase = Phase(float(seconds), int(requests), traffic)
    if phase.seconds <= 0 or phase.requests < 1 or text.count(":") > 2:
        raise ValueError(f"phase {text!r}: give SECONDS:REQUESTS:TRAFFIC, both above 0")
    return phase


class Timeline:
    """What is to run at each moment of a changing load, and the tokens of each second.

    Args:
        phases: in their order.

    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = list(phases)
        self._ends = list(itertools.accumulate(phase.seconds for phase in phases))
        self.by_second = [0] * -(-round(1e6 * self._ends[-1]) // 1_000_000)
        """Tokens that came in each second."""
        self.by_phase = [0] * len(self.phases)
        """Tokens that came in each phase."""

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return self._ends[-1]

    def phase(self, at: float) -> Phase | None:
        """The phase at `at` seconds from the start; None: all are over."""
        index = bisect.bisect_right(self._ends, at)
        return self.phases[index] if index < len(self.phases) else None

    def add(self, at: float, tokens: int) -> None:
        """Tokens have come, at `at` seconds. Those that come after the end do not count."""
        if at < self._ends[-1]:
            self.by_second[int(at)] += tokens
            self.by_phase[bisect.bisect_right(self._ends, at)] += tokens

    def changes(self) -> list[int]:
        """The seconds in which a phase begins, without the first."""
        return [int(end) for end in self._ends[:-1]]


def drive_phases(
    engine: Any,
    timeline: Timeline,
    submit: Callable[[str], str],
    clock: Callable[[], float],
    tokens_of: Callable[[Any], int],
) -> None:
    """Keep an engine at a changing load, and count its tokens.

    Args:
        engine: vLLM's LLMEngine; requests in flight at the end are aborted.
        timeline: of the load; its tokens are counted.
        submit: (traffic) -> id of a new request.
        clock: seconds.
        tokens_of: (RequestOutput) -> new tokens in it.

    """
    flying: set[str] = set()
    start = clock()
    while (phase := timeline.phase(clock() - start)) is not None:
        while len(flying) < phase.requests:
            flying.add(submit(phase.traffic))
        outputs = engine.step()
        at = clock() - start
        timeline.add(at, sum(map(tokens_of, outputs)))
        flying -= {output.request_id for output in outputs if output.finished}
    engine.abort_request(list(flying))
    while engine.has_unfinished_requests():
        engine.step()


Record: TypeAlias = dict[str, Any]
"""A changing load served once: engine, repeat, phases (as text), by_second."""


def median_seconds(records: Iterable[Record]) -> dict[str, list[float]]:
    """Tokens of each second by engine, medians over its repeats."""
    found: dict[str, list[list[int]]] = {}
    for record in records:
        found.setdefault(record["engine"], []).append(record["by_second"])
    return {
        engine: [statistics.median(each) for each in zip(*rows, strict=True)]
        for engine, rows in found.items()
    }


def oracle_seconds(
    seconds: dict[str, list[float]], static: Callable[[str], bool]
) -> list[float] | None:
    """Of each second, the tokens of the static engine that was best in it; None: there is none."""
    rows = [row for engine, row in seconds.items() if static(engine)]
    return [max(each) for each in zip(*rows, strict=True)] if rows else None


def seconds_to_half(regret: Sequence[float], changes: Sequence[int]) -> list[int]:
    """After each change, the seconds until regret is half of what it was in the first second.

    What is left at the end of the phase is no regret of the change: it is taken off both.
    """
    found = []
    for start, end in itertools.pairwise([*changes, len(regret)]):
        rows = regret[start:end]
        rest = statistics.median(rows[len(rows) // 2 :])
        half = rest + max(0.0, rows[0] - rest) / 2
        found.append(next(i for i, row in enumerate(rows) if i == len(rows) - 1 or row <= half))
    return found


def markdown(records: Sequence[Record], static: Callable[[str], bool]) -> str:
    """Tokens a second of each phase by engine, and regret against the best static engine."""
    if not records:
        return ""
    phases = [parse_phase(text) for text in records[0]["phases"]]
    timeline = Timeline(phases)
    seconds = median_seconds(records)
    oracle = oracle_seconds(seconds, static)
    if oracle is not None:
        seconds["best static each second"] = oracle
    starts = [0, *timeline.changes()]
    parts = list(zip(starts, [*starts[1:], len(timeline.by_second)], strict=True))
    head = ["engine", *map(str, phases), "all"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for engine, row in seconds.items():
        means = [statistics.fmean(row[a:b]) for a, b in parts] + [statistics.fmean(row)]
        cells = [engine, *(f"{mean:.0f}" for mean in means)]
        if oracle is not None and engine in seconds and not static(engine):
            best = [statistics.fmean(oracle[a:b]) for a, b in parts] + [statistics.fmean(oracle)]
            cells = [engine] + [
                f"{mean:.0f} ({mean / top:.2f})" if top else f"{mean:.0f}"
                for mean, top in zip(means, best, strict=True)
            ]
        lines.append("| " + " | ".join(cells) + " |")
    if oracle is not None:
        for engine, row in seconds.items():
            if static(engine):
                continue
            regret = [1 - own / top if top else 0.0 for own, top in zip(row, oracle, strict=True)]
            lines += ["", f"Regret of {engine} by second: " + " ".join(f"{r:.2f}" for r in regret)]
            if changes := timeline.changes():
                halves = seconds_to_half(regret, changes)
                lines += [
                    "",
                    f"After each change {engine} had half of its regret left after "
                    f"{', '.join(map(str, halves))} s",
                ]
    return "\n".join(lines)
