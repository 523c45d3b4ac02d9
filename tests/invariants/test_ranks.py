# SPDX-License-Identifier: Apache-2.0
"""All ranks check, or none does: one that waits for another's findings would wait for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ddtree.invariants import stop


@pytest.mark.parametrize(("other", "own"), [(True, True), (False, False)])
def test_ranks_that_agree(monkeypatch: pytest.MonkeyPatch, other: bool, own: bool) -> None:
    _two_ranks(monkeypatch, other)
    monkeypatch.setenv("VLLM_DDTREE_CHECK", str(int(own)))
    assert stop.enabled_on_all_ranks() is own


@pytest.mark.parametrize(("other", "missing"), [(True, "0"), (False, "1")])
def test_ranks_that_differ(monkeypatch: pytest.MonkeyPatch, other: bool, missing: str) -> None:
    _two_ranks(monkeypatch, other)
    monkeypatch.setenv("VLLM_DDTREE_CHECK", str(int(not other)))
    with pytest.raises(
        ValueError, match=rf"VLLM_DDTREE_CHECK=1 is not set for ranks \[{missing}\]"
    ):
        stop.enabled_on_all_ranks()


def _two_ranks(monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    """This rank is the first of two; the second one gives `other`."""

    def gather(found: list[Any], own: Any, group: Any) -> None:
        found[:] = [own, other]

    group = SimpleNamespace(world_size=2, cpu_group=None)
    monkeypatch.setattr(stop, "get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
