# SPDX-License-Identifier: Apache-2.0
"""What every command has: a cheap start, one line for an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.running import ROOT, command

HEAVY = ("torch", "vllm", "transformers", "matplotlib", "numpy", "triton")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from vllm_ddtree.cli.app import app\n"
        "try:\n"
        f"    app({arguments!r})\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_help_names_the_commands() -> None:
    shown = command("--help").stdout
    assert all(name in shown for name in ("check", "tune", "bench", "demo"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["check", "only-a-target"], "give a drafter"),
        (["check", "--max-num-seqs", "4", "a", "b"], "TARGET and DRAFTER first"),
        (["bench", "--load", "none"], "--load"),
        (["tune", "--from", "nowhere.jsonl"], "nowhere.jsonl"),
        (["demo", "--chain", "99"], "--chain 99"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], says: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-ddtree") and says in line
