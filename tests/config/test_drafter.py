# SPDX-License-Identifier: Apache-2.0
"""Drafters that fit are taken, others are refused with what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.building import DRAFTER, TARGET, build, edited, refusal
from tests.config.checkpoints import as_speculators


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 9]}},
            ["[0, 1, 9] name layer 9", "4 layers end with 3"],
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


def test_the_format_of_the_speculators_library(tmp_path: Path) -> None:
    drafter = as_speculators(DRAFTER, tmp_path / "drafter", TARGET)
    spec = build({"model": str(drafter)}).speculative_config
    assert (spec.block_size, spec.depth_limit, spec.max_depth) == (8, 7, 7)
    spec = build({"model": str(drafter), "num_speculative_tokens": 3}).speculative_config
    assert (spec.block_size, spec.depth_limit) == (8, 3)


def test_speculators_that_name_no_block_size(tmp_path: Path) -> None:
    """What they propose by default is their block without the root."""
    drafter = as_speculators(DRAFTER, tmp_path / "drafter", TARGET, block_size=None)
    assert build({"model": str(drafter)}).speculative_config.block_size == 8


@pytest.mark.parametrize("key", ["aux_hidden_state_layer_ids", "mask_token_id"])
def test_speculators_without_a_key(tmp_path: Path, key: str) -> None:
    drafter = as_speculators(DRAFTER, tmp_path / "drafter", TARGET, **{key: None})
    message = refusal(lambda: build({"model": str(drafter)}))
    assert f"{drafter}/config.json has no {key}" in message and "DFlash drafter" in message


def test_other_speculators(tmp_path: Path) -> None:
    other = as_speculators(DRAFTER, tmp_path / "drafter", TARGET, speculators_model_type="mlp")
    message = refusal(lambda: build({"model": str(other)}))
    assert f"model={str(other)!r}" in message and "'mlp'" in message and "DFlash" in message


@pytest.mark.parametrize("key", ["block_size", "mask_token_id"])
def test_the_missing_key_is_named_with_its_file(tmp_path: Path, key: str) -> None:
    changes: dict[str, Any] = {"block_size": None}
    if key == "mask_token_id":
        changes = {"dflash_config": {"target_layer_ids": [0, 1, 2]}}
        key = "dflash_config.mask_token_id"
    drafter = edited(DRAFTER, tmp_path / "drafter", **changes)
    message = refusal(lambda: build({"model": str(drafter)}))
    assert f"{drafter}/config.json has no {key}" in message


def test_the_users_block_where_the_checkpoint_names_none(tmp_path: Path) -> None:
    """As with method dflash, whose block is num_speculative_tokens + 1."""
    drafter = edited(DRAFTER, tmp_path / "drafter", block_size=None)
    keys = {"model": str(drafter), "num_speculative_tokens": 5}
    spec = build(keys).speculative_config
    assert (spec.block_size, spec.depth_limit) == (6, 5)
    message = refusal(lambda: build({**keys, "num_speculative_tokens": 32}))
    assert "num_speculative_tokens=32" in message and "from 1 to 31" in message
