# SPDX-License-Identifier: Apache-2.0
"""The soak's report."""

import json
from pathlib import Path
from typing import Any


def write(report: dict[str, Any], folder: Path, judged: bool) -> None:
    """soak.json and soak.md. What is not `judged` has differences that may yet be failures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "soak.json").write_text(json.dumps(report, indent=1))
    info, engines = report["info"], report["engines"]
    lines = [f"{info['gpu']}, vLLM {info['vllm']}, PyTorch {info['torch']}", ""]
    lines += ["| | " + " | ".join(engines) + " |", "|---|" + "---|" * len(engines)]

    def row(label: str, value: Any) -> None:
        lines.append(f"| {label} | " + " | ".join(str(value(e)) for e in engines.values()) + " |")

    row("requests", lambda e: sum(e["statuses"].values()))
    for status in ("finished", "aborted", "refused", "failed"):
        row(status, lambda e, status=status: e["statuses"].get(status, 0))
    row("tokens", lambda e: e["tokens"])
    row("seconds", lambda e: f"{e['serve_s']:.0f}")
    row("preemptions", lambda e: int(e["counters"].get("num_preemptions", 0)))
    row("prefix cache hits, tokens", lambda e: int(e["counters"].get("prefix_cache_hits", 0)))
    row("acceptance length", lambda e: f"{e['acceptance']:.2f}")
    row("ran again alone, differ", lambda e: f"{e['alone']}, {e['alone_differ']}")
    row("again without speculation, differ", lambda e: f"{e.get('plain')}, {e.get('plain_differ')}")
    row(
        "logprobs apart at most (of tokens)",
        lambda e: f"{e['logprob_apart_max']:.3f} ({e['logprobs_compared']})",
    )
    for key in ("allocated", "reserved", "in_use", "host"):
        if any(key in e["memory_mib"] for e in engines.values()):
            row(
                f"{key} MiB: first, last, a 1000 requests",
                lambda e, key=key: "{first:.0f}, {last:.0f}, {slope:+.2f}".format(
                    **e["memory_mib"][key]
                ),
            )
    for kind, greedy in (("greedy", True), ("seeded", False)):
        gaps = sorted(
            d["gap"] for d in report["differences"] if (d["params"]["temperature"] == 0) == greedy
        )
        if not gaps:
            continue
        middle, tail = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.95)]
        lines += ["", f"{len(gaps)} {kind} differences, gaps in logits: median {middle:.4f}, "]
        lines[-1] += f"95 % below {tail:.4f}, largest {gaps[-1]:.4f} (allowed: {report['tie']})"
    lines += ["", *(f"- FAILED: {line}" for line in report["failures"][:50])]
    lines.append("failed" if report["failures"] else "passed" if judged else "not finished")
    (folder / "soak.md").write_text("\n".join(lines) + "\n")
