# SPDX-License-Identifier: Apache-2.0
"""The family is read from config.json; what vLLM's own chain would draft wrongly is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests import conditional
from tests.config.building import TARGET, build, edited, refusal
from tests.config.checkpoints import as_speculators
from vllm_ddtree.integration import families


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    makers = {
        "DFlash2": conditional.dflash2,
        "LiLiCorr": conditional.lilicorr,
        "DSpark": conditional.dspark,
    }
    return {
        name: make(tmp_path_factory.mktemp(name)).drafter  # type: ignore[operator]
        for name, make in makers.items()
    }


@pytest.mark.parametrize(
    ("family", "method", "top_k"),
    [("DFlash2", "dflash", 4), ("LiLiCorr", "dflash", 4), ("DSpark", "dspark", 16)],
)
def test_families(drafters: dict[str, Path], family: str, method: str, top_k: int) -> None:
    spec = build({"model": str(drafters[family]), "budget": 3}).speculative_config
    assert (spec.family, spec.method, spec.conditional) == (family, method, True)
    # A path's best nodes may have any rank of their depth: all candidates are kept.
    assert (spec.top_k, spec.depth_limit, spec.block_size, spec.draft_positions) == (top_k, 7, 8, 7)
    assert f"family={family}" in repr(spec)
    assert spec.num_speculative_tokens == 3


def test_the_anchor_drafts_the_first_token(tmp_path: Path) -> None:
    drafter = conditional.dspark(tmp_path, from_anchor=True).drafter
    spec = build({"model": str(drafter)}).speculative_config
    assert (spec.block_size, spec.draft_positions, spec.depth_limit) == (8, 8, 8)
    message = refusal(lambda: build({"model": str(drafter), "num_speculative_tokens": 9}))
    assert "from 1 to 8, the drafter's block_size: it limits the depth" in message


def test_slots_of_a_draft(tmp_path: Path) -> None:
    """vLLM 0.32 keeps slots free for a draft, whatever its method and the budget."""
    from_anchor = conditional.dspark(tmp_path, from_anchor=True).drafter
    slots = {
        build(keys).speculative_config.max_num_new_slots_for_drafting
        for model in (conditional.NANO.drafter, from_anchor)
        for keys in ({"model": str(model), "budget": 1}, {"model": str(model), "budget": 15})
    }
    assert len(slots) == 1 and slots <= {0, 7}


@pytest.mark.parametrize("family", ["DFlash2", "LiLiCorr"])
def test_candidates_are_fixed(drafters: dict[str, Path], family: str) -> None:
    model = {"model": str(drafters[family])}
    assert build({**model, "top_k": 4}).speculative_config.top_k == 4
    message = refusal(lambda: build({**model, "top_k": 8}))
    key = {"DFlash2": "selector_top_k", "LiLiCorr": "lilicorr_candidate_topk"}[family]
    assert "top_k=8 is not valid for method ddtree: leave it out, or give 4" in message
    assert key in message


@pytest.mark.parametrize("family", ["DFlash2", "LiLiCorr", "DSpark"])
def test_keys_of_the_head(drafters: dict[str, Path], tmp_path: Path, family: str) -> None:
    """Each one that is missing is named; vLLM would stop while it loads."""
    config = json.loads((drafters[family] / "config.json").read_text())
    for key in families.Family(family).head_keys:
        section, _, name = key.rpartition(".")
        nested = {k: v for k, v in config.get("dflash_config", {}).items() if k != name}
        changes = {"dflash_config": nested} if section else {name: None}
        drafter = edited(drafters[family], tmp_path / name, **changes)
        message = refusal(functools.partial(build, {"model": str(drafter)}))
        assert f"give a {family} drafter ({drafter}/config.json has no {key})" in message


@pytest.mark.parametrize("top_k", [None, 0, 128, "16", True])
def test_candidates_that_are_no_number(tmp_path: Path, top_k: Any) -> None:
    drafter = conditional.dflash2(tmp_path, selector_top_k=top_k).drafter
    message = refusal(lambda: build({"model": str(drafter)}))
    assert f"dflash_config.selector_top_k is a whole number from 1 to 64, not {top_k!r}" in message


@pytest.mark.parametrize("value", [0, "no", 1.0])
def test_conditional_is_a_truth_value(drafters: dict[str, Path], value: Any) -> None:
    model = {"model": str(drafters["DFlash2"])}
    assert not build({**model, "conditional": False}).speculative_config.conditional
    assert f"conditional={value!r}" in refusal(lambda: build({**model, "conditional": value}))


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        ("DFlash2", {"draft_vocab_size": 2000}, ["draft_vocab_size is 2000 of 2048", "translate"]),
        ("LiLiCorr", {"draft_vocab_size": 2000}, ["draft_vocab_size is 2000 of 2048"]),
        ("DSpark", {"markov_head_type": "gated"}, ["markov_head_type", "'vanilla', not 'gated'"]),
        ("DSpark", {"markov_head_type": "rnn"}, ["'vanilla', not 'rnn'"]),
        ("DSpark", {"projector_type": "domino"}, ["projector_type='domino'"]),
        ("DSpark", {"architectures": ["Qwen3XPressModel"]}, ["XPress", "vLLM's own method"]),
        ("DSpark", {"architectures": ["DSparkV41DraftModel"]}, ["DeepSeek-V4"]),
        ("DSpark", {"architectures": ["K3DSparkModel"]}, ["latent attention"]),
        (
            "DSpark",
            {"architectures": ["DSparkDraftModel"], "model_type": "deepseek_v4"},
            ["DeepSeek-V4"],
        ),
        ("DSpark", {"block_size": None}, ["DSpark drafter", "has no block_size"]),
        ("DSpark", {"target_layer_ids": None}, ["has no target_layer_ids"]),
        ("DSpark", {"mask_token_id": None}, ["has no mask_token_id"]),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_refusals(
    drafters: dict[str, Path],
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    parts: list[str],
) -> None:
    drafter = edited(drafters[family], tmp_path / "drafter", **changes)
    message = refusal(lambda: build({"model": str(drafter)}))
    for part in (f"model={str(drafter)!r} is not valid for method ddtree", *parts):
        assert part in message


@pytest.mark.parametrize(
    ("family", "key"), [("DSpark", "markov_rank"), ("DFlash2", "selector_rank")]
)
def test_a_head_under_a_plain_name(
    drafters: dict[str, Path], tmp_path: Path, family: str, key: str
) -> None:
    """vLLM's method "dflash" knows nothing of it."""
    drafter = edited(drafters[family], tmp_path / "drafter", architectures=["DFlashDraftModel"])
    message = refusal(lambda: build({"model": str(drafter)}))
    assert f"({key}); vLLM would draft without it" in message


def test_vllms_other_name(drafters: dict[str, Path], tmp_path: Path) -> None:
    drafter = edited(drafters["DSpark"], tmp_path / "drafter", architectures=["DSparkDraftModel"])
    assert build({"model": str(drafter)}).speculative_config.family == "DSpark"


@pytest.mark.parametrize("name", families.SINCE)
def test_later_architectures_name_their_vllm(
    drafters: dict[str, Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "is_known", lambda architecture: False)
    drafter = edited(drafters["DFlash2"], tmp_path / "drafter", architectures=[name])
    message = refusal(lambda: build({"model": str(drafter)}))
    assert f"has no {name}; install vLLM {families.SINCE[name]} or later" in message


@pytest.mark.parametrize("family", ["DFlash2", "DSpark"])
def test_the_format_of_the_speculators_library(
    drafters: dict[str, Path], tmp_path: Path, family: str
) -> None:
    drafter = as_speculators(drafters[family], tmp_path / "drafter", TARGET)
    spec = build({"model": str(drafter)}).speculative_config
    assert (spec.family, spec.block_size, spec.draft_positions) == (family, 8, 7)
    for key in ("block_size",):
        other = as_speculators(drafters[family], tmp_path / key, TARGET, **{key: None})
        assert build({"model": str(other)}).speculative_config.block_size == 8
