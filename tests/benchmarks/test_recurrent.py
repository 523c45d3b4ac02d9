# SPDX-License-Identifier: Apache-2.0
"""The benchmark of recurrent layers runs real rounds."""

from __future__ import annotations

import pytest
import torch

from benchmarks.recurrent import COLUMNS, VLLM_COLUMNS, Sizes, make_cases, random_trees, table_of

SIZES = Sizes(layers=2, key_heads=1, heads=2, key_dim=16, value_dim=16)


def variables(case) -> dict:
    """What a case's function closes over."""
    return dict(
        zip(case.__code__.co_freevars, (c.cell_contents for c in case.__closure__), strict=True)
    )


@pytest.mark.parametrize(("num_rows", "batch"), [(7, 2), (40, 1)])
def test_a_round_moves_every_state(num_rows: int, batch: int, device: str) -> None:
    cases = make_cases(SIZES, num_rows, batch, 4, 5, device, torch.float32)
    assert list(cases) == COLUMNS
    closed = variables(cases["round"])
    before = [layer.states.clone() for layer in closed["layers"]]
    cases["round"]()
    assert torch.isfinite(closed["out"]).all()
    for layer, then in zip(closed["layers"], before, strict=True):
        assert torch.isfinite(layer.states).all()
        moved = (layer.states != then).flatten(1).any(1).tolist()
        assert moved == [False, *[True] * batch], "all but the null block move"


def test_trees() -> None:
    trees = random_trees(2, 40, 5, "cpu")
    parents = trees.parents[1].tolist()
    depths = [0]
    for row in range(1, 40):
        depths.append(depths[parents[row]] + 1)
        own = trees.masks[1, row].tolist()
        bits = sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(own))
        above = trees.masks[1, parents[row]].tolist()
        assert bits == sum((w & 0xFFFFFFFF) << 32 * i for i, w in enumerate(above)) | 1 << row
    assert parents[:6] == [-1, 0, 1, 2, 3, 4]
    assert max(depths) == 5


def test_table() -> None:
    row = {"batch": 1, "num_rows": 64, **dict.fromkeys([*COLUMNS, *VLLM_COLUMNS], 0.25)}
    head, _, line = table_of([row]).splitlines()
    assert head.count("|") == line.count("|") == 2 + len(COLUMNS) + len(VLLM_COLUMNS) + 1
