# SPDX-License-Identifier: Apache-2.0
"""Where LiLiCorr's anchor is looked for, by the ways in which either vLLM asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator

from vllm_ddtree.proposer.lilicorr import DDTreeLiLiCorr

MOST = 5


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches vLLM's own."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        LiLiCorrSpeculator, "prepare_context_anchor", lambda self, *args: found.append(args)
    )
    return found


def speculator() -> Any:
    made = object.__new__(DDTreeLiLiCorr)
    made.context_starts = torch.full((MOST + 1,), 77, dtype=torch.int32)
    return made


def test_before_the_draft(asked: list[tuple[Any, ...]]) -> None:
    """vLLM 0.32, and 0.33 without a graph or when it profiles: as given."""
    made = speculator()
    for args in (("batch", "rejected"), (2, torch.zeros(3), "rejected")):
        made.prepare_context_anchor(*args)
        made.target_input_buffers = SimpleNamespace(query_start_loc=torch.zeros(MOST + 1))
        made.prepare_context_anchor(*args)
        del made.target_input_buffers
        assert asked[-2] is not None and all(a is b for a, b in zip(asked[-1], args, strict=True))
        assert all(a is b for a, b in zip(asked[-2], args, strict=True))


def test_inside_a_graph(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 names the target's layout: the context's own is read instead."""
    staged = []
    monkeypatch.setattr(
        LiLiCorrSpeculator,
        "_prepare_graph_replay",
        lambda self, *args, **kwargs: staged.append((args, kwargs)),
        raising=False,
    )
    made = speculator()
    made.target_input_buffers = SimpleNamespace(query_start_loc=torch.zeros(MOST + 1))
    starts = torch.tensor([0, 4, 8], dtype=torch.int32)
    batch: Any = SimpleNamespace(num_reqs=2, num_tokens=8, query_start_loc=starts)
    made._prepare_graph_replay(batch, 4, "states", dummy_run=False)
    assert staged == [((batch, 4, "states"), {"dummy_run": False})]
    assert made.context_starts.tolist() == [0, 4, 8, 8, 8, 8]
    made.prepare_context_anchor(4, made.target_input_buffers.query_start_loc, "rejected")
    assert asked == [(4, made.context_starts, "rejected")]
    assert asked[0][1] is made.context_starts
