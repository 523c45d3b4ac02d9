# SPDX-License-Identifier: Apache-2.0
"""`vllm-ddtree tune` runs an engine on prompts, and says what its rounds were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.running import command
from tests.conftest import NANO
from vllm_ddtree.trace.read import Trace, read_trace

TEXTS = ("def read_file(path):", "import os\n", "def is_empty(self):")


def tuned(folder: Path, budget: int) -> tuple[dict[str, Any], Trace]:
    """What the command says of a budget, and the rounds that it saw."""
    data, rounds = folder / "prompts.jsonl", folder / f"rounds-{budget}.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    done = command(
        *("tune", str(NANO.target), str(NANO.drafter), "--budget", f"{budget}", "--json"),
        *("--max-tokens", "20", "--keep", str(rounds)),
        *("--max-model-len", "256", "--max-num-seqs", "4"),
        *("--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "3"),
        *("--skip-chat-template", "--custom-output-len", "20"),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), read_trace(rounds)


def test_tune_on_a_data_set(tmp_path: Path) -> None:
    said, trace = tuned(tmp_path, 15)
    assert len(trace.requests) == 3
    trees = [each for each in trace.rounds if each.num_nodes == 15]
    assert said["rounds"] == len(trees) > 5 and said["nodes"] == 15
    emitted = sum(len(each.path) for each in trees)
    assert abs(said["acceptance_length"]["15"] - emitted / len(trees)) < 1e-9
    lengths = [said["acceptance_length"][str(budget)] for budget in (0, 1, 3, 5, 7, 11, 15)]
    assert lengths[0] == 1.0 and lengths == sorted(lengths) and lengths[-1] > 1.3
    # A smaller budget accepts what was counted for it, where both begin at the same token.
    _, smaller = tuned(tmp_path, 5)
    for large, small in zip(trace.requests, smaller.requests, strict=True):
        first, other = large.rounds[0], small.rounds[0]
        assert (first.num_nodes, other.num_nodes, first.root) == (15, 5, other.root)
        assert first.tokens[:6] == other.tokens
        assert [row for row in first.path if row <= 5] == list(other.path)
