# SPDX-License-Identifier: Apache-2.0
"""What every command has: a cheap start, one line for an error."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from tests.cli.running import ROOT, command
from vllm_ddtree.cli.app import App
from vllm_ddtree.cli.errors import CommandError, WrongUsage

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


@pytest.mark.parametrize(
    ("raised", "status", "says"),
    [
        (KeyboardInterrupt(), 130, "vllm-ddtree: interrupted"),
        (CommandError("it\nfails"), 1, "vllm-ddtree: it fails"),
        (WrongUsage("no"), 2, "vllm-ddtree: no"),
        (typer.Exit(3), 3, ""),
    ],
)
def test_how_commands_end(
    raised: BaseException, status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = App(pretty_exceptions_enable=False)

    @own.command()
    def one() -> None:
        raise raised

    with pytest.raises(SystemExit) as end:
        own([])
    assert end.value.code == status
    assert capsys.readouterr().err.strip() == says
