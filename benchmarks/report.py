# SPDX-License-Identifier: Apache-2.0
"""Runs of a load benchmark: their statistics, Markdown table and plots.

A run is one engine at one concurrency, once. This is its record; all times are by the requests' own
clocks:

engine, concurrency, cycle, repeat, requests
traffic            what the requests are about, and how they are sampled; "" where none was named
tokens, seconds    output tokens of all requests, wall time from first submission to last answer
tokens_s           tokens / seconds: prefill, ramp and drain included, for every engine alike
tpot_ms            mean over requests of (last token - first token) / (tokens - 1)
ttft_ms            median time to the first token
rounds             verify rounds of all requests together (plain decoding: decode steps)
ms_round           decode time of all requests / rounds
acceptance         mean tokens a round, accepted + 1
steps              steps of the engine, prefill included
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import changing

Run = dict[str, Any]


def run_record(
    engine: str,
    concurrency: int,
    seconds: float,
    requests: Sequence[tuple[int, float, float]],
    drafts: int,
    accepted: int,
    steps: int,
    traffic: str = "",
) -> Run:
    """A run's record. requests: (tokens, seconds to the first one, seconds from first to last)."""
    tokens = sum(n for n, _, _ in requests)
    decode = sum(last for _, _, last in requests)
    rounds = drafts or sum(n - 1 for n, _, _ in requests)
    return {
        "engine": engine,
        "traffic": traffic,
        "concurrency": concurrency,
        "requests": len(requests),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_s": tokens / seconds,
        "tpot_ms": 1e3 * statistics.fmean(last / max(1, n - 1) for n, _, last in requests),
        "ttft_ms": 1e3 * statistics.median(first for _, first, _ in requests),
        "rounds": rounds,
        "ms_round": 1e3 * decode / max(1, rounds),
        "acceptance": 1 + accepted / drafts if drafts else 1.0,
        "steps": steps,
    }


def timed_record(
    engine: str,
    traffic: str,
    concurrency: int,
    seconds: float,
    tokens: int,
    whole: float,
    drafts: int,
    accepted: int,
    steps: int,
) -> Run:
    """The record of a run of so many seconds.

    Its requests have no times of their own. Counts are those of the `whole` seconds, of which
    `seconds` give the tokens.
    """
    return {
        "engine": engine,
        "traffic": traffic,
        "concurrency": concurrency,
        "requests": concurrency,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_s": tokens / seconds,
        "tpot_ms": 1e3 * concurrency * seconds / max(1, tokens),
        "ttft_ms": 0.0,
        "rounds": drafts,
        "ms_round": 1e3 * whole / max(1, steps),
        "acceptance": 1 + accepted / drafts if drafts else 1.0,
        "steps": steps,
    }


def is_static(engine: str) -> bool:
    """Whether an engine's setting does not follow the load; adaptive chains are rivals, so static.

    By its name: only those of `"budget": "auto"` end with "auto".
    """
    return not engine.endswith("auto")


def _key(run: Run) -> tuple[str, str, int]:
    engine, traffic = run["engine"], run.get("traffic", "")
    if engine.endswith(" sampled"):  # of a record of before there was a traffic
        engine, traffic = engine.removesuffix(" sampled"), "sampled"
    return engine, traffic, run["concurrency"]


def summarise(runs: Iterable[Run]) -> list[Run]:
    """One row an (engine, traffic, concurrency), in order of appearance: medians, range of
    tokens/s."""
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault(_key(run), []).append(run)
    rows = []
    for (engine, traffic, concurrency), group in groups.items():
        row: Run = {"engine": engine, "traffic": traffic, "concurrency": concurrency}
        row["runs"] = len(group)
        keys = ("tokens_s", "tpot_ms", "ttft_ms", "rounds", "ms_round", "acceptance", "steps")
        for key in keys:
            row[key] = statistics.median(run[key] for run in group)
        row["min"] = min(run["tokens_s"] for run in group)
        row["max"] = max(run["tokens_s"] for run in group)
        rows.append(row)
    return rows


def ratios(runs: Sequence[Run], base: str) -> dict[tuple[str, str, int], float]:
    """Median tokens/s of each (engine, traffic, concurrency) over that of engine `base`."""
    speed = {_key(row): row["tokens_s"] for row in summarise(runs)}
    found = {}
    for (engine, traffic, n), value in speed.items():
        if (base, traffic, n) in speed:
            found[engine, traffic, n] = value / speed[base, traffic, n]
    return found


def best_static(runs: Sequence[Run]) -> dict[tuple[str, int], str]:
    """The static engine with the most tokens/s, by (traffic, concurrency)."""
    best: dict[tuple[str, int], Run] = {}
    for row in summarise(runs):
        load = row["traffic"], row["concurrency"]
        if (
            is_static(row["engine"])
            and row["tokens_s"] > best.get(load, {"tokens_s": 0})["tokens_s"]
        ):
            best[load] = row
    return {load: row["engine"] for load, row in best.items()}


def over_best_static(runs: Sequence[Run]) -> dict[tuple[str, str, int], tuple[str, float]]:
    """The best static engine, and tokens/s over it: the median over repeats of each repeat's ratio.

    Regret is 1 less that ratio.
    """
    best = best_static(runs)
    repeats = {(_key(run), run.get("cycle", 0), run.get("repeat", 0)): run for run in runs}
    shares: dict[tuple[str, str, int], list[float]] = {}
    for (key, *repeat), run in repeats.items():
        engine = best.get(key[1:])
        base = repeats.get(((engine, *key[1:]), *repeat))
        if base is not None and base["tokens_s"] > 0:
            shares.setdefault(key, []).append(run["tokens_s"] / base["tokens_s"])
    return {key: (best[key[1:]], statistics.median(found)) for key, found in shares.items()}


def markdown(runs: Sequence[Run], bases: Sequence[str] = ("chain-15", "plain")) -> str:
    """Table of all runs, by concurrency; ratios of tokens/s to the engines `bases`."""
    against = {base: ratios(runs, base) for base in bases}
    bases = [base for base in bases if against[base]]
    over = over_best_static(runs)
    traffic = any(run.get("traffic") for run in runs)
    head = ["N", *(["traffic"] if traffic else []), "engine", "runs", "tokens/s", "min-max"]
    head += [f"/ {base}" for base in bases] + ["best static", "/ best static"]
    head += ["TPOT ms", "TTFT ms", "acceptance", "ms a round", "rounds", "steps"]
    lines = [_line(head), "|" + "---|" * len(head)]
    for row in sorted(summarise(runs), key=lambda row: (row["traffic"], row["concurrency"])):
        key = _key(row)
        cells = [row["concurrency"], *([row["traffic"]] if traffic else []), row["engine"]]
        cells += [row["runs"], f"{row['tokens_s']:.0f}", f"{row['min']:.0f}-{row['max']:.0f}"]
        cells += [f"{against[base][key]:.2f}" if key in against[base] else "" for base in bases]
        best, share = over.get(key, ("", None))
        cells += [best, "" if share is None else f"{share:.2f}"]
        cells += [f"{row[key]:.2f}" for key in ("tpot_ms", "ttft_ms", "acceptance", "ms_round")]
        cells += [f"{row['rounds']:.0f}", f"{row['steps']:.0f}"]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def plot(runs: Sequence[Run], folder: Path, base: str = "chain-15") -> list[Path]:
    """throughput.png, and ratio.png against `base` if it ran. Nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = summarise(runs)
    for row in rows:  # a line of its own for each traffic
        row["base"], row["engine"] = row["engine"], f"{row['engine']} {row['traffic']}".strip()
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    relative = ratios(runs, base)
    written = []

    def draw(name: str, label: str, value: Callable[[Run], float | None]) -> None:
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        for engine in engines:
            points = [(r["concurrency"], value(r), r) for r in rows if r["engine"] == engine]
            points = sorted((p for p in points if p[1] is not None), key=lambda p: p[0])
            if points:
                x, y, own = zip(*points, strict=True)
                scale = [v / r["tokens_s"] for v, r in zip(y, own, strict=True)]
                low = [v - s * r["min"] for v, s, r in zip(y, scale, own, strict=True)]
                high = [s * r["max"] - v for v, s, r in zip(y, scale, own, strict=True)]
                axes.errorbar(x, y, yerr=(low, high), marker="o", capsize=2, label=engine)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("concurrent requests")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend()
        path = folder / name
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
        written.append(path)

    draw("throughput.png", "output tokens/s", lambda row: row["tokens_s"])
    if relative:
        draw(
            "ratio.png",
            f"output tokens/s over {base}",
            lambda row: relative.get((row["base"], row["traffic"], row["concurrency"])),
        )
    return written


def write(report: dict[str, Any], folder: Path, plots: bool = False) -> None:
    """load.json and load.md (and plots) of {"info": ..., "engines": ..., "runs": [...]}."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "load.json").write_text(json.dumps(report, indent=1))
    info = report["info"]
    text = f"{info.get('gpu')}, vLLM {info.get('vllm')}, PyTorch {info.get('torch')}\n\n"
    if report["runs"]:
        text += markdown(report["runs"]) + "\n"
    if report.get("changing"):
        text += "\nChanging load, tokens/s (over the best static engine of each second)\n\n"
        text += changing.markdown(report["changing"], is_static) + "\n"
    if report["engines"]:
        text += "\n"
    for name, facts in report["engines"].items():
        text += f"- {name}: " + ", ".join(f"{k} {v}" for k, v in facts.items()) + "\n"
    (folder / "load.md").write_text(text)
    if plots and report["runs"]:
        plot(report["runs"], folder)


def merge(files: Sequence[Path]) -> dict[str, Any]:
    """One report of several load.json files of the same kind of machine.

    Raises ValueError if they come from different GPUs or versions.
    """
    reports = [json.loads(file.read_text()) for file in files]
    kinds = {tuple(r["info"].get(k) for k in ("gpu", "vllm", "torch")) for r in reports}
    if len(kinds) != 1:
        raise ValueError(f"reports of different machines: {sorted(map(str, kinds))}")
    engines: dict[str, Any] = {}
    for report in reports:
        engines |= report["engines"]
    info = {**reports[0]["info"], "arguments": [r["info"].get("arguments") for r in reports]}
    runs = [run for report in reports for run in report["runs"]]
    found = [record for report in reports for record in report.get("changing", [])]
    return {"info": info, "engines": engines, "runs": runs, "changing": found}
