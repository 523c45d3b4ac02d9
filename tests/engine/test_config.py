# SPDX-License-Identifier: Apache-2.0
"""Targets that only vLLM's own reading of the model's class, which takes seconds, tells apart are
refused at start."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddtree_testbed
from tests.config.building import build, other_target, refusal


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    ddtree_testbed.prepare()
    from vllm_ddtree import plugin

    plugin.register()


def test_a_hybrid_target(tmp_path: Path) -> None:
    target = other_target(
        tmp_path / "target",
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention", "conv"],
        conv_L_cache=3,
    )
    message = refusal(lambda: build(model=target))
    for part in (f"target {str(target)!r}", "recurrent layers", "use method dflash"):
        assert part in message
