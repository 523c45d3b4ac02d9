# SPDX-License-Identifier: Apache-2.0
"""Which drafters are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.building import DRAFTER, build, edited, refusal


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 9]}},
            ["target layer 10", "4 layers"],
        ),
        ({"dflash_config": {"mask_token_id": 1}}, ["target_layer_ids"]),
        ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, ["mask_token_id"]),
        ({"block_size": None}, ["block_size"]),
        ({"block_size": 64}, ["block_size 64", "2 to 32"]),
        ({"block_size": 1}, ["block_size 1", "2 to 32"]),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_wrong_drafters(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    drafter = edited(DRAFTER, tmp_path / "drafter", **changes)
    message = refusal(lambda: build({"model": str(drafter)}))
    for part in (f"model={str(drafter)!r}", *parts):
        assert part in message


def test_a_longer_block_allows_a_deeper_tree(tmp_path: Path) -> None:
    drafter = edited(DRAFTER, tmp_path / "drafter", block_size=16)
    spec = build({"model": str(drafter), "budget": 5}).speculative_config
    assert (spec.budget, spec.depth_limit, spec.block_size) == (5, 15, 16)
