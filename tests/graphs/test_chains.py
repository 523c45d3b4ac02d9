# SPDX-License-Identifier: Apache-2.0
"""Graphs of trees and of chains live beside each other, over a stand-in for vLLM's graph
manager."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.config.compilation import CUDAGraphMode

from vllm_ddtree.graphs.chains import capture_chains
from vllm_ddtree.round.step import Step


class Desc(NamedTuple):
    cg_mode: CUDAGraphMode
    num_tokens: int
    uniform_token_count: int | None


FULL = [Desc(CUDAGraphMode.FULL, rows * n, rows) for rows in (1, 8, 16, 64) for n in (1, 2)]
PIECEWISE = [Desc(CUDAGraphMode.PIECEWISE, 16, None)]


class Manager:
    """Captures what it describes; a graph says in which form it was captured."""

    def __init__(self, runtime: Any) -> None:
        self.graphs: dict[Desc, str] = {}
        self._capture_descs = {CUDAGraphMode.PIECEWISE: PIECEWISE, CUDAGraphMode.FULL: FULL[:]}
        self._max_full_descs_to_capture: int | None = None
        self._runtime = runtime
        self.captured: list[Desc] = []

    def capture(self) -> None:
        for descs in self._capture_descs.values():
            self.captured += descs
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            assert desc not in self.graphs
            self.graphs[desc] = "chain" if self._runtime.chains_asked else "tree"

    def replay(self, desc: Desc, chains: bool) -> str:
        self._runtime.step = Step(as_chains=chains)
        assert desc in self.graphs
        return self.graphs[desc]


def captured(more: Callable[[Manager], None] = lambda _: None) -> tuple[Manager, Any]:
    runtime: Any = SimpleNamespace(chains_asked=False, step=Step())
    manager = Manager(runtime)
    more(manager)
    manager.capture()
    capture_chains(manager, runtime, 15, manager.capture)
    assert not runtime.chains_asked
    return manager, runtime


def test_each_form_has_its_graph() -> None:
    manager, _ = captured()
    for desc in FULL:
        assert manager.replay(desc, chains=False) == "tree"
        if desc.uniform_token_count == 16:
            assert manager.replay(desc, chains=True) == "chain"
    assert list(manager.graphs) == FULL  # what vLLM counts and measures
    assert manager._capture_descs[CUDAGraphMode.FULL] == FULL
    assert manager.captured.count(PIECEWISE[0]) == 1


def test_memory_profile_counts_both() -> None:
    def profile(manager: Manager) -> None:
        manager._max_full_descs_to_capture = 2

    manager, _ = captured(profile)
    assert len(manager._capture_descs[CUDAGraphMode.FULL]) == len(FULL) + 2
    assert manager.captured == PIECEWISE + FULL


def test_no_such_graph_no_second_capture() -> None:
    def small(manager: Manager) -> None:
        manager._capture_descs = {CUDAGraphMode.FULL: FULL[:2]}

    manager, _ = captured(small)
    assert manager.captured == FULL[:2] and type(manager.graphs) is dict


def test_a_failed_capture_leaves_no_mark() -> None:
    runtime: Any = SimpleNamespace(chains_asked=False, step=Step())
    manager = Manager(runtime)

    def fails() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        capture_chains(manager, runtime, 15, fails)
    assert not runtime.chains_asked
    assert manager._capture_descs[CUDAGraphMode.FULL] == FULL
