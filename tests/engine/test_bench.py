# SPDX-License-Identifier: Apache-2.0
"""`vllm-ddtree bench` end to end: servers that run, and servers that it starts."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.running import command
from tests.conftest import NANO
from tests.engine.server import serving

TEXTS = ("def read_file(path):", "import os", "def is_empty(self):", "class Reader:")
SMALL = ("--waves", "1", "--least", "3", "--custom-output-len", "12")


def prompts(folder: Path) -> Path:
    path = folder / "prompts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def test_two_running_servers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with (
        serving(folders[0], NANO.target) as large,
        serving(folders[1], NANO.target, budget=1) as small,
    ):
        done = command(
            *("bench", "--url", f"tree-12={large.base}", "--url", f"tree-1={small.base}/v1"),
            *("--load", "1,2", "--prompts", str(prompts(tmp_path)), "--out", str(out), *SMALL),
        )
        assert done.returncode == 0, done.stderr
        counted, _ = large.metrics()
    written = json.loads((out / "bench.json").read_text())
    assert [(run["name"], run["load"]) for run in written["runs"]] == [
        ("tree-12", 1),
        ("tree-1", 1),
        ("tree-12", 2),
        ("tree-1", 2),
    ]
    for each in written["runs"]:
        assert (each["completed"], each["failed"]) == (3, 0) and each["tokens_s"] > 0
    lengths = {run["name"]: run["acceptance"] for run in written["runs"]}
    assert lengths["tree-12"] > lengths["tree-1"] > 1.0
    assert counted["spec_decode_num_accepted_tokens"][0] > 0
    assert "Output tokens a second" in done.stdout
    # Without a pair nobody knows how the servers were configured.
    assert done.stdout.splitlines()[-1].startswith("use tree-")


def test_servers_that_it_starts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command(
        *("bench", str(NANO.target), str(NANO.drafter), "--methods", "tree-300,tree-7"),
        *("--serve", "--enforce-eager --dtype float32 --max-model-len 256 --max-num-seqs 4"),
        *("--load", "2", "--prompts", str(prompts(tmp_path)), "--out", str(out), "--json", *SMALL),
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    (run,) = written["runs"]
    assert (run["name"], run["completed"]) == ("tree-7", 3) and run["acceptance"] > 1.0
    assert list(written["failures"]) == ["tree-300"]
    assert "budget=300" in written["failures"]["tree-300"]
    spec = {"method": "ddtree", "model": str(NANO.drafter), "budget": 7}
    assert written["recommendation"]["spec"] == spec
