# SPDX-License-Identifier: Apache-2.0
"""The rounding simulation computes the target, in each of its orders, where nothing is rounded."""

from __future__ import annotations

import pytest
import torch

from benchmarks import rounding
from tests.conftest import NANO
from tests.oracle.qwen3 import Target

ROOTS = torch.tensor([0, 0, 1, 3, 1, 2, 6, 5, 8, 3])


@pytest.mark.parametrize("attend", [rounding.once, rounding.tiles, rounding.tree(ROOTS)])
def test_the_target(attend: rounding.Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "bf16", lambda x: x)
    monkeypatch.setattr(rounding, "KEY_TILE", 3)
    ids = torch.arange(7, 7 + len(ROOTS))
    got = rounding.Target(NANO.target, lambda x: x).logits(ids, attend)
    oracle = Target.load(NANO.target)
    hidden, _, _ = oracle.forward(ids.tolist())
    torch.testing.assert_close(got, oracle.logits(hidden), rtol=1e-4, atol=1e-4)


def test_rounding_is_seen() -> None:
    ids = torch.arange(7, 7 + len(ROOTS))
    target = rounding.Target(NANO.target, rounding.fp8)
    assert not torch.equal(
        target.logits(ids, rounding.once), target.logits(ids, rounding.tree(ROOTS))
    )
    x = torch.tensor([[448.0, 17.0, -3.3], [0.0, 0.0, 0.0]])
    assert rounding.fp8(x).tolist() == [[448.0, 16.0, -3.25], [0.0, 0.0, 0.0]]
