# SPDX-License-Identifier: Apache-2.0
"""What a drafter and its target must share: refused by name at start, or warned of, once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.building import DRAFTER, TARGET, build, edited, refusal
from tests.config.checkpoints import as_speculators


def dflash(**changes: Any) -> dict[str, Any]:
    keys = {"mask_token_id": 1, "target_layer_ids": [0, 1, 2], **changes}
    return {"dflash_config": keys}


def test_a_target_of_another_size(tmp_path: Path) -> None:
    target = edited(TARGET, tmp_path / "target", hidden_size=256)
    message = refusal(lambda: build(model=target))
    for part in (
        f"model={str(DRAFTER)!r}",
        "hidden states of size 128 (its hidden_size)",
        "the target's are of size 256",
        "give the drafter trained for this target",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_size": 64}, ["size 64 (its hidden_size)", "of size 128"]),
        ({"target_hidden_size": 256}, ["size 256 (its target_hidden_size)", "of size 128"]),
        (dflash(use_aux_hidden_state=False), ["use_aux_hidden_state", "3 of size 128"]),
        (dflash(target_layer_ids=[0, 1, 1]), ["target_layer_ids [0, 1, 1]", "twice"]),
        (dflash(target_layer_ids=[-2, 1, 2]), ["[-2, 1, 2]", "before the first"]),
        (dflash(target_layer_ids=[0, 1, 4]), ["[0, 1, 4] name layer 4", "4 layers end with 3"]),
        (dflash(target_layer_ids=[0, 1.5]), ["[0, 1.5] are not whole numbers"]),
        (dflash(target_layer_ids=[0, "1"]), ["target_layer_ids are not whole numbers"]),
        ({"vocab_size": 4000}, ["4000 tokens", "target's 2048"]),
        ({"draft_vocab_size": 2049}, ["2049 tokens", "target's 2048"]),
        (dflash(mask_token_id=5000), ["mask_token_id 5000", "2048 tokens"]),
        (dflash(mask_token_id=-1), ["mask_token_id -1", "2048 tokens"]),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, ["4 heads", "3 KV heads"]),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            ["sliding-window layers", "no sliding_window"],
        ),
        (dflash(use_swa=True), ["sliding-window layers", "no sliding_window"]),
        (
            dflash(use_swa=True, swa_window_size="64"),
            ["swa_window_size '64' is no whole number of at least 1"],
        ),
        (dflash(use_swa=True, swa_window_size=0), ["swa_window_size 0"]),
        (
            {"layer_types": ["full_attention"]},
            ["give a DFlash drafter", "config.json", "layer_types"],
        ),
        (dflash(sample_from_anchor=True), ["plain DFlash drafter", "sample_from_anchor"]),
        ({"block_size": "8"}, ["block_size '8'", "2 to 32"]),
        ({"block_size": True}, ["block_size True", "2 to 32"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    drafter = edited(DRAFTER, tmp_path / "drafter", **changes)
    message = refusal(lambda: build({"model": str(drafter)}))
    for part in (f"model={str(drafter)!r} is not valid for method ddtree", *parts):
        assert part in message


def test_heads_over_ranks(tmp_path: Path) -> None:
    drafter = edited(DRAFTER, tmp_path / "drafter", num_attention_heads=6, num_key_value_heads=3)
    message = refusal(lambda: build({"model": str(drafter)}, tensor_parallel_size=2))
    assert "its 3 KV heads cannot be spread over 2 ranks" in message
    build({"model": str(drafter)})


@pytest.mark.parametrize(
    ("key", "value"), [("sample_from_anchor", True), ("projector_type", "domino")]
)
def test_speculators_that_draft_otherwise(tmp_path: Path, key: str, value: Any) -> None:
    drafter = as_speculators(DRAFTER, tmp_path / "drafter", TARGET, **{key: value})
    message = refusal(lambda: build({"model": str(drafter)}))
    assert "plain DFlash drafter" in message and key in message


def test_a_drafter_without_fc(tmp_path: Path) -> None:
    """It takes the target's states side by side; no matrix makes one of them."""
    states = {"use_aux_hidden_state": False}
    size = {"hidden_size": 384, "target_hidden_size": 64}
    for section in ({"dflash_config": {**dflash()["dflash_config"], **states}}, states):
        drafter = edited(DRAFTER, tmp_path / str(len(section)), **size, **section)
        assert build({"model": str(drafter)}).speculative_config.block_size == 8
        shutil.rmtree(drafter)
    # dflash_config counts before eagle_config.
    drafter = edited(
        DRAFTER, tmp_path / "both", eagle_config=states, **dflash(**{next(iter(states)): True})
    )
    assert build({"model": str(drafter)}).speculative_config.block_size == 8


def test_a_drafter_of_its_own_size(tmp_path: Path) -> None:
    """It says of which size the hidden states are that it reads."""
    drafter = edited(DRAFTER, tmp_path / "drafter", hidden_size=64, target_hidden_size=128)
    assert build({"model": str(drafter)}).speculative_config.block_size == 8


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is warned of from now on."""
    from vllm_ddtree.config import pair

    said: list[str] = []
    # Not on the logger itself: whoever calls `init_logger` next would undo that.
    note = SimpleNamespace(warning_once=lambda text, *args: said.append(text % args))
    monkeypatch.setattr(pair, "logger", note)
    return said


def test_a_pair_that_fits_is_not_warned_of(warnings: list[str], tmp_path: Path) -> None:
    build()
    build({"model": str(as_speculators(DRAFTER, tmp_path / "drafter", TARGET))})
    assert not warnings


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"vocab_size": 1000}, "its vocab_size is 1000, the target's 2048"),
        ({"num_target_layers": 6}, "for one of 6 layers (num_target_layers), this has 4"),
        (dflash(target_layer_ids=[2, 0, 1]), "not in ascending order"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_may_work_badly(
    warnings: list[str], tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    drafter = edited(DRAFTER, tmp_path / "drafter", **changes)
    build({"model": str(drafter)})
    assert len(warnings) == 1 and part in warnings[0] and str(drafter) in warnings[0]


def test_another_tokenizer(warnings: list[str], tmp_path: Path) -> None:
    drafter = edited(DRAFTER, tmp_path / "drafter")
    path = drafter / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 2047, "content": "[M]"})
    path.write_text(json.dumps(tokenizer))
    build({"model": str(drafter)})
    assert not warnings  # a mask token more
    words = list(tokenizer["model"]["vocab"])
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[words[-1]], vocabulary[words[-2]] = vocabulary[words[-2]], vocabulary[words[-1]]
    path.write_text(json.dumps(tokenizer))
    build({"model": str(drafter)})
    assert len(warnings) == 1 and "tokenizer.json has another vocabulary" in warnings[0]


def test_fewer_positions_than_the_target(warnings: list[str], tmp_path: Path) -> None:
    drafter = edited(DRAFTER, tmp_path / "drafter", max_position_embeddings=64)
    spec = build({"model": str(drafter)}).speculative_config
    assert spec.draft_model_config.hf_config.max_position_embeddings == 256
    assert len(warnings) == 1 and "64 positions" in warnings[0] and "is 256" in warnings[0]


def test_a_small_vocabulary_limits_the_candidates(tmp_path: Path) -> None:
    drafter = edited(DRAFTER, tmp_path / "drafter", draft_vocab_size=12)
    assert build({"model": str(drafter)}).speculative_config.top_k == 12


def loaded(draft_vocab: int | None = None, **changes: Any) -> tuple[Any, Any]:
    """(vllm_config, drafter) as vLLM has loaded it; vocabulary 100, hidden size 64."""
    hf: Any = SimpleNamespace(
        vocab_size=100, hidden_size=64, draft_vocab_size=draft_vocab, mask_token_id=99
    )
    draft = SimpleNamespace(hf_config=hf, model="drafter")
    family = changes.pop("family", "DFlash")
    spec = SimpleNamespace(draft_model_config=draft, draft_load_config=None, family=family)
    config = SimpleNamespace(
        speculative_config=spec,
        load_config=SimpleNamespace(load_format=changes.pop("load_format", "auto")),
        model_config=SimpleNamespace(get_vocab_size=lambda: 100),
    )
    rows = SimpleNamespace(embedding_dim=64, num_embeddings_padded=128)
    parts = {
        "model": SimpleNamespace(embed_tokens=changes.pop("embed_tokens", rows)),
        "lm_head": rows,
        "has_own_lm_head": True,
        "draft_id_to_target_id": None,
        **changes,
    }
    return config, SimpleNamespace(**parts)


def offsets(*ids: int) -> torch.Tensor:
    return torch.tensor(ids) - torch.arange(len(ids))


@pytest.mark.parametrize(
    ("drafter", "part"),
    [
        (
            {"embed_tokens": SimpleNamespace(embedding_dim=128, num_embeddings_padded=128)},
            "no embed_tokens of its own, and the target's are of size 128, not 64",
        ),
        (
            {"embed_tokens": SimpleNamespace(embedding_dim=64, num_embeddings_padded=64)},
            "mask_token_id 99 is outside its embeddings, of 64 tokens",
        ),
        ({"family": "DSpark"}, "SimpleNamespace has no Markov head"),
        (
            {"lm_head": SimpleNamespace(embedding_dim=128)},
            "no lm_head of its own, and the target's is of size 128, not 64",
        ),
        (
            {
                "draft_vocab": 3,
                "has_own_lm_head": False,
                "draft_id_to_target_id": offsets(1, 2, 3),
            },
            "3 tokens (draft_vocab_size), and has no lm_head",
        ),
        (
            {"draft_vocab": 3, "draft_id_to_target_id": offsets(0, 1, 100)},
            "d2t names tokens outside the vocabulary of 100",
        ),
        (
            {"draft_vocab": 3, "draft_id_to_target_id": offsets(-1, 1, 9)},
            "d2t names tokens outside the vocabulary of 100",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_weights_lack(drafter: dict[str, Any], part: str) -> None:
    from vllm_ddtree.config.loaded_drafter import check_loaded_drafter

    message = refusal(lambda: check_loaded_drafter(*loaded(**drafter)))
    assert "model='drafter' is not valid for method ddtree" in message and part in message


def test_weights_that_are_whole() -> None:
    from vllm_ddtree.config.loaded_drafter import check_loaded_drafter

    check_loaded_drafter(*loaded())
    check_loaded_drafter(*loaded(has_own_lm_head=False))
    check_loaded_drafter(*loaded(3, draft_id_to_target_id=offsets(0, 7, 99)))
    # Padding of the vocabulary alone: vLLM's map has no entries, and the ids are the same.
    check_loaded_drafter(*loaded(draft_id_to_target_id=torch.zeros(100, dtype=torch.long)))
    none = torch.zeros(3, dtype=torch.long)
    check_loaded_drafter(*loaded(3, draft_id_to_target_id=none, load_format="dummy"))


def test_a_map_that_moves_no_token_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint has none, or one for the target's first tokens: vLLM cannot tell either."""
    from vllm_ddtree.config import loaded_drafter

    said: list[str] = []
    monkeypatch.setattr(
        loaded_drafter.logger, "warning_once", lambda text, *values: said.append(text % values)
    )
    loaded_drafter.check_loaded_drafter(*loaded(3, draft_id_to_target_id=offsets(0, 1, 2)))
    assert len(said) == 1 and "target's first 3" in said[0] and "d2t" in said[0]


def test_heads_that_no_backend_takes(tmp_path: Path) -> None:
    from vllm_ddtree.config.loaded_drafter import check_draft_backend

    check_draft_backend(build())
    drafter = edited(DRAFTER, tmp_path / "drafter", head_dim=24)
    config = build({"model": str(drafter)})
    message = refusal(lambda: check_draft_backend(config))
    for part in (f"model={str(drafter)!r}", "takes its heads of 24", "CPU_ATTN takes [32, "):
        assert part in message
