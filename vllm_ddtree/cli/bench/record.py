# SPDX-License-Identifier: Apache-2.0
"""What was measured: a record a run, and the median of a method's runs at a load."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """One method at one load, once."""

    name: str
    load: int
    """Requests in flight."""
    repeat: int
    tokens_s: float
    """Output tokens a second of all requests, prefill and ramp included."""
    tpot_ms: float
    """Mean over requests of the time between two tokens."""
    ttft_ms: float
    """Median time to the first token."""
    acceptance: float | None
    """Acceptance length; None without speculation."""
    completed: int
    failed: int

    @classmethod
    def of(cls, name: str, load: int, repeat: int, result: dict[str, Any]) -> Run:
        """From the result file of `vllm bench serve`."""
        return cls(
            name,
            load,
            repeat,
            result["output_throughput"],
            result["mean_tpot_ms"],
            result["median_ttft_ms"],
            result.get("spec_decode_acceptance_length"),
            result["completed"],
            result.get("failed", 0),
        )


@dataclass
class Results:
    """All that a benchmark found."""

    runs: list[Run]
    failures: dict[str, str]
    """Methods that did not run, and why."""

    @property
    def names(self) -> list[str]:
        """Methods in order."""
        return list(dict.fromkeys(run.name for run in self.runs))

    @property
    def loads(self) -> list[int]:
        """Ascending."""
        return sorted({run.load for run in self.runs})

    def of(self, name: str, load: int) -> list[Run]:
        """A method's runs at a load."""
        return [run for run in self.runs if (run.name, run.load) == (name, load)]

    def median(self, name: str, load: int, what: str = "tokens_s") -> float | None:
        """Of a field of these runs; None: it has no value."""
        values: Sequence[Any] = [getattr(run, what) for run in self.of(name, load)]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None
