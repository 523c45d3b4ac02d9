# SPDX-License-Identifier: Apache-2.0
"""`bench` as tables, JSON and a plot."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_ddtree.cli.bench.recommend import Advice
from vllm_ddtree.cli.bench.record import Results

TABLES = (
    ("tokens_s", "Output tokens a second, by requests in flight", "{:.1f}"),
    ("tpot_ms", "Milliseconds a token", "{:.2f}"),
    ("ttft_ms", "Milliseconds to the first token", "{:.1f}"),
    ("acceptance", "Acceptance length", "{:.2f}"),
)
"""Field, title and format of a number."""


def as_json(results: Results, advice: Advice | None, about: dict[str, Any]) -> str:
    """All runs, what failed, what follows."""
    entry = None if advice is None else {**asdict(advice), "line": advice.line()}
    return json.dumps(
        {
            **about,
            "runs": [asdict(run) for run in results.runs],
            "failures": results.failures,
            "recommendation": entry,
        },
        indent=2,
    )


def table(results: Results, what: str, title: str, form: str) -> Table:
    """A row a method, a column a load; the best of a load is bold, and plain decoding is 1x."""
    built = Table(title=title, title_justify="left", min_width=len(title), box=None, pad_edge=False)
    built.add_column("method")
    for load in results.loads:
        built.add_column(f"{load}", justify="right")
    for name in results.names:
        cells = []
        for load in results.loads:
            value = results.median(name, load, what)
            cell = "" if value is None else form.format(value)
            if value is not None and what == "tokens_s":
                plain = results.median("plain", load)
                cell += f" ({value / plain:.2f}x)" if plain else ""
                most = max(results.median(other, load) or 0.0 for other in results.names)
                cell = f"[bold]{cell}[/]" if value == most else cell
            cells.append(cell)
        if any(cells):
            built.add_row(name, *cells)
    return built


def show(results: Results, advice: Advice | None, console: Console) -> None:
    """Tables, failures, and the recommendation."""
    for what, title, form in TABLES:
        built = table(results, what, title, form)
        if built.row_count:
            console.print(built)
            console.print()
    for run in results.runs:
        if run.failed:
            console.print(f"{run.name} at {run.load}: {run.failed} requests failed", style="yellow")
    for name, why in results.failures.items():
        console.print(f"{name}: {why}", style="yellow", markup=False)
    if advice is None:
        console.print("No method ran at every load: nothing to recommend.")
        return
    gain = "" if advice.gain is None else f", {advice.gain:.2f} x plain decoding"
    console.print(f"Best over these loads: {advice.name}{gain}")
    # One line, whatever the terminal's width: it is there to be pasted.
    print(advice.line())


def plot(results: Results, path: Path) -> bool:
    """Tokens a second by load, a line a method; False: matplotlib is not there."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in results.names:
        points = [(load, speed) for load in results.loads if (speed := results.median(name, load))]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xlabel="requests in flight", ylabel="output tokens a second")
    axes.set_xscale("log", base=2)
    axes.set_xticks(results.loads, [str(load) for load in results.loads])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
