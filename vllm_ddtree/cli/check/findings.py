# SPDX-License-Identifier: Apache-2.0
"""What `check` finds, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table
from rich.text import Text


class State(StrEnum):
    """How a finding is meant."""

    GOOD = "ok"
    NOTE = "note"
    """Neither good nor bad."""
    WARNING = "warning"
    """It runs, maybe not as wished."""
    REFUSED = "refused"
    """It does not run."""


STYLES = {
    State.GOOD: "green",
    State.NOTE: "dim",
    State.WARNING: "yellow",
    State.REFUSED: "bold red",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    state: State
    text: str
    fix: str = ""
    """What to do about it; empty where nothing is to be done, or where the text says it."""


def refused(findings: Sequence[Finding]) -> bool:
    """Whether something does not run."""
    return any(finding.state is State.REFUSED for finding in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """{"fits": bool, "findings": [{"topic", "state", "text", "fix"}]}."""
    entries = [{**asdict(finding), "state": finding.state.value} for finding in findings]
    return json.dumps({"fits": not refused(findings), "findings": entries}, indent=2)


def show(findings: Sequence[Finding], console: Console) -> None:
    """A line a finding; in a terminal as a table, with the fix below."""
    if not console.is_terminal:
        for finding in findings:
            fix = finding.fix and f". Fix: {finding.fix}"
            print(f"{finding.state.value}: {finding.topic}: {finding.text}{fix}")
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        # No markup: configurations hold brackets.
        text = Text(finding.text)
        if finding.fix:
            text.append(f"\nFix: {finding.fix}", style="bold")
        table.add_row(Text(finding.state.value, STYLES[finding.state]), finding.topic, text)
    console.print(table)
