# SPDX-License-Identifier: Apache-2.0
"""The time between rounds is measured right, with events that take it from a clock of the
test's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import between


class Gpu:
    """A GPU that is as far as `now`, milliseconds."""

    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = Gpu.now

        def elapsed_time(self, later: Gpu.Event) -> float:
            return later.at - self.at


class Manager:
    """Graphs of 5 ms."""

    def run_fullgraph(self, graph: str) -> str:
        Gpu.now += 5.0
        return graph


class Runner:
    """A model runner whose rounds take 1 ms more."""

    def __init__(self) -> None:
        self.cudagraph_manager = Manager()

    def execute_model(self, wait: float, in_graph: bool = True) -> None:
        Gpu.now += wait
        if in_graph:
            assert self.cudagraph_manager.run_fullgraph("verify") == "verify"

    def sample_tokens(self) -> int:
        Gpu.now += 1.0
        return 7


def test_pauses_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Gpu.Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner = Runner()
    before = dict(vars(runner)), dict(vars(runner.cudagraph_manager))
    worker: Any = SimpleNamespace(model_runner=runner)
    between.start(worker)
    # The first has no round before it, the fourth no graph.
    for wait, in_graph in ((9.0, True), (0.02, True), (0.5, True), (7.0, False), (0.25, True)):
        runner.execute_model(wait, in_graph)
        assert runner.sample_tokens() == 7
    assert between.stop(worker) == pytest.approx([20.0, 500.0, 250.0])
    assert (dict(vars(runner)), dict(vars(runner.cudagraph_manager))) == before
    assert set(vars(worker)) == {"model_runner"}


def test_spread() -> None:
    found = between.spread([10.0] * 9 + [110.0])
    assert found["median"] == 10.0 and found["mean"] == 20.0 and found["rounds"] == 10
    assert found["ninth decile"] > 50.0
    assert between.spread([1.0]) == {}
