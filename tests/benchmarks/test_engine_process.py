# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own open, take turns in order, and end; what fails there is said
here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, serve_load
from benchmarks.engine_process import EngineProcess


@contextmanager
def open_list(*items: int, left: str) -> Iterator[list[int]]:
    """An "engine"; leaves a file behind when it is closed."""
    if not items:
        raise ValueError("an empty list")
    try:
        yield [*items]
    finally:
        Path(left).write_text("closed")


def appended(engine: list[int], item: int) -> tuple[int, list[int]]:
    engine.append(item)
    return os.getpid(), engine


def test_an_engine_lives_until_it_is_left(tmp_path: Path) -> None:
    left = str(tmp_path / "left")
    with EngineProcess(open_list, 1, 2, left=left) as engine:
        engine.open()
        where, items = engine.call(appended, 3)
        assert where != os.getpid() and items == [1, 2, 3]
        assert engine.call(appended, 4) == (where, [1, 2, 3, 4])
        assert not Path(left).exists()
    assert Path(left).exists() and engine.process.exitcode == 0


def test_what_goes_wrong_there_is_said_here(tmp_path: Path) -> None:
    with EngineProcess(open_list, left=str(tmp_path / "left")) as engine:
        with pytest.raises(RuntimeError, match="ValueError: an empty list"):
            engine.open()
        with pytest.raises((RuntimeError, OSError)):
            engine.call(appended, 3)


class Recorded:
    """Stands for an EngineProcess; writes down what it is asked."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *error: object) -> None:
        self.log.append(("closed", self.name))

    def open(self) -> None:
        self.log.append(("open", self.name))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        if function is serve_load.describe:
            return {}
        if function is serve_load.profiles_of:
            self.log.append(("profile", self.name, *args[1]))
            return [{"rounds": 7}]
        assert function is serve_load.drive
        prompts, tokens, n, label, *_ = args
        if tokens == serve_load.WARM_UP_TOKENS:
            return None
        self.log.append((label, n, prompts[0]))
        return report.run_record(label, n, 1.0, [(tokens, 0.1, 0.5)], drafts=2, accepted=3, steps=4)


@pytest.mark.parametrize("together", [True, False])
def test_turns(together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    monkeypatch.setattr(serve_load, "engine_process", lambda _, name: Recorded(name, log))
    monkeypatch.setattr(
        serve_load, "read_prompts", lambda args, _: [[[r]] * 9 for r in range(args.repeats)]
    )
    argv = ["t", "d", "--engines", "plain", "tree-7", "--concurrency", "1", "4", "--repeats", "2"]
    out = tmp_path / "new" / "folder"
    argv += ["--profile", "1", "--out", str(out), *["--together"] * together]
    args = serve_load.parse(argv)
    serve_load.load_engines(args, {"info": {}, "engines": {}, "runs": []})
    runs = [("plain", "tree-7"), ("tree-7", "plain")]
    if together:
        expected: list[Any] = [("open", "plain"), ("open", "tree-7")]
        expected += [
            (name, n, [repeat]) for repeat in (0, 1) for n in (1, 4) for name in runs[repeat]
        ]
        expected += [("profile", "plain", 1), ("profile", "tree-7", 1)]
        expected += [("closed", "tree-7"), ("closed", "plain")]
    else:
        expected = []
        for name in runs[0]:
            expected += [("open", name)]
            expected += [(name, n, [repeat]) for repeat in (0, 1) for n in (1, 4)]
            expected += [("profile", name, 1), ("closed", name)]
    assert log == expected
    assert len(json.loads((out / "load.json").read_text())["runs"]) == 8
    assert json.loads((out / "profile-tree-7.json").read_text()) == [{"rounds": 7}]


def test_the_order_of_starts(tmp_path: Path) -> None:
    def opened(*more: str) -> list[str]:
        log: list[Any] = []
        argv = ["t", "d", "--engines", "plain", "tree-auto", "chain-7", "--out", str(tmp_path)]
        args = serve_load.parse([*argv, *more])
        engines: Any = {name: Recorded(name, log) for name in args.engines}
        serve_load.start_all(engines, args, {"engines": {}})
        return [name for _, name in log]

    assert opened() == ["plain", "tree-auto", "chain-7"]
    at_once = opened("--llm", '{"kv_cache_memory_bytes": 1}')
    assert at_once[-1] == "tree-auto" and {*at_once} == {"plain", "chain-7", "tree-auto"}
