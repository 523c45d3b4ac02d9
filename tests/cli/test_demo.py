# SPDX-License-Identifier: Apache-2.0
"""`vllm-ddtree demo` is the demo, where there are models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from tests.conftest import NANO
from vllm_ddtree.cli.demo import demo
from vllm_ddtree.cli.errors import CommandError, WrongUsage


def context(*arguments: str) -> Any:
    return SimpleNamespace(args=list(arguments))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments with which the demo was started."""
    calls: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        calls.append(arguments)
        return 1

    monkeypatch.setattr("vllm_ddtree.demo.__main__.main", main)
    return calls


def test_it_is_the_demo(ran: list[list[str]]) -> None:
    with pytest.raises(typer.Exit) as end:
        demo(context("--max-tokens", "4"))
    assert end.value.exit_code == 1 and ran == [["--max-tokens", "4"]]


def test_without_models(
    ran: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vllm_ddtree.demo.arguments.find_models", lambda: tmp_path / "models")
    with pytest.raises(CommandError) as caught:
        demo(context())
    for part in (str(tmp_path / "models"), "./demo", "clone", "source distribution"):
        assert part in str(caught.value)
    assert not ran
    with pytest.raises(typer.Exit):
        demo(context("--target", str(NANO.target), f"--drafter={NANO.drafter}"))
    assert len(ran) == 1


def test_wrong_arguments_and_help(ran: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WrongUsage, match=r"^demo: --chain 99: give"):
        demo(context("--chain", "99"))
    with pytest.raises(typer.Exit) as end:
        demo(context("--help"))
    assert end.value.exit_code == 0 and not ran
    captured = capsys.readouterr()
    assert "--show-tree" in captured.out and not captured.err
