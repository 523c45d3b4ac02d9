# SPDX-License-Identifier: Apache-2.0
"""`vllm-ddtree tune` runs an engine on prompts, and says what its rounds were."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.running import command
from tests.conftest import NANO
from vllm_ddtree.trace.read import read_trace


def test_tune_on_a_data_set(tmp_path: Path) -> None:
    texts = ("def read_file(path):", "import os\n", "def is_empty(self):")
    data, rounds = tmp_path / "prompts.jsonl", tmp_path / "rounds.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    done = command(
        *("tune", str(NANO.target), str(NANO.drafter), "--budget", "15", "--max-tokens", "20"),
        *("--keep", str(rounds), "--json", "--max-model-len", "256", "--max-num-seqs", "4"),
        *("--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "3"),
        *("--skip-chat-template", "--custom-output-len", "20"),
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    trace = read_trace(rounds)
    assert len(trace.requests) == 3
    trees = [each for each in trace.rounds if each.num_nodes == 15]
    assert said["rounds"] == len(trees) > 5 and said["nodes"] == 15
    emitted = sum(len(each.path) for each in trees)
    assert abs(said["acceptance_length"]["15"] - emitted / len(trees)) < 1e-9
    lengths = [said["acceptance_length"][str(budget)] for budget in (0, 1, 3, 5, 7, 11, 15)]
    assert lengths[0] == 1.0 and lengths == sorted(lengths) and lengths[-1] > 1.3
