# SPDX-License-Identifier: Apache-2.0
"""All graphs of a runner are captured on one stream, over a stand-in for vLLM's `graph_capture`."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ddtree.graphs.capture_scope import CaptureScope


class Log(list[str]):
    """What happened, in order."""

    def __init__(self, shared: CaptureScope) -> None:
        super().__init__()
        self.streams = 0

        @contextmanager
        def graph_capture(device: str) -> Iterator[int]:
            self.streams += 1
            self.append(f"enter {device}")
            try:
                yield self.streams
            finally:
                self.append("exit")

        self.graph_capture: Any = shared.graph_capture(graph_capture)


@pytest.fixture
def shared() -> CaptureScope:
    return CaptureScope()


@pytest.fixture
def log(shared: CaptureScope, monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log(shared)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: log.append("synchronize"))
    return log


def capture_two(log: Log) -> list[int]:
    streams = []
    for _ in range(2):
        with log.graph_capture("gpu") as stream:
            streams.append(stream)
    return streams


def test_all_graphs_of_a_runner_share_a_stream(shared: CaptureScope, log: Log) -> None:
    with shared.scope():
        assert capture_two(log) == [1, 1]
        assert log == ["enter gpu"]
    assert log == ["enter gpu", "synchronize", "exit"]
    with shared.scope():
        assert capture_two(log) == [2, 2], "of another capture"


@pytest.mark.parametrize("wanted", [True, False])
def test_a_runners_captures(shared: CaptureScope, log: Log, wanted: bool) -> None:
    asked = []

    def is_wanted(config: str) -> bool:
        asked.append(config)
        return wanted

    def capture_model(runner: Any, *, profile_only: bool) -> list[int]:
        assert profile_only
        return capture_two(log)

    capture: Any = shared.capture_model(capture_model, is_wanted)  # type: ignore[arg-type]
    streams = capture(SimpleNamespace(vllm_config="config"), profile_only=True)
    assert streams == ([1, 1] if wanted else [1, 2])
    assert asked == ["config"]


def test_a_runner_without_graphs(shared: CaptureScope, log: Log) -> None:
    with shared.scope():
        pass
    assert log == []


def test_other_runners_capture_as_before(log: Log) -> None:
    assert capture_two(log) == [1, 2]
    assert log == ["enter gpu", "exit"] * 2


def test_a_capture_that_fails_leaves_nothing_open(shared: CaptureScope, log: Log) -> None:
    raised = pytest.raises(RuntimeError, match="out of memory")
    with raised, shared.scope(), log.graph_capture("gpu"):
        raise RuntimeError("out of memory")
    assert log == ["enter gpu", "exit"]
    assert capture_two(log) == [2, 3]
