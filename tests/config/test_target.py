# SPDX-License-Identifier: Apache-2.0
"""Targets are taken or refused by what their configuration tells."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.config.building import TARGET, build, edited, refusal


def test_a_sliding_window_target(tmp_path: Path) -> None:
    window = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}
    target = edited(TARGET, tmp_path / "target", **window)
    config = build(model=target)
    assert config.model_config.get_sliding_window() == 64


@pytest.mark.parametrize(
    ("attribute", "value", "what"),
    [
        ("is_hybrid", True, "recurrent layers other than gated delta net"),
        ("is_attention_free", True, "recurrent layers"),
        ("is_encoder_decoder", True, "an encoder"),
        ("rswa_window", 64, "sliding-window"),
        ("hf_text_config", SimpleNamespace(index_topk=64), "sparse latent attention"),
    ],
)
def test_other_targets(
    monkeypatch: pytest.MonkeyPatch, attribute: str, value: Any, what: str
) -> None:
    """Nano with the trait: reading a real one's model class takes vLLM seconds."""
    from vllm_ddtree.config.engine import finish_engine_config

    config = build()
    model_type = type(config.model_config)
    monkeypatch.setattr(model_type, attribute, property(lambda _: value), raising=False)
    message = refusal(lambda: finish_engine_config(None, config))
    for part in (f"target {str(TARGET)!r}", what, "use method dflash"):
        assert part in message


def test_states_are_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ddtree.config.engine import finish_engine_config

    config = build()
    model_type = type(config.model_config)
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")
    text_config = SimpleNamespace(**dict.fromkeys(names, 2))
    monkeypatch.setattr(model_type, "is_hybrid", property(lambda _: True))
    monkeypatch.setattr(
        model_type, "hf_text_config", property(lambda _: text_config), raising=False
    )
    config.kv_transfer_config = SimpleNamespace()
    message = refusal(lambda: finish_engine_config(None, config))
    assert "--kv-transfer-config or --kv-offloading-size for a target with recurrent" in message
