# SPDX-License-Identifier: Apache-2.0
"""`mean_budget`: what it means, and engines that cannot share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.config.building import build, refusal
from vllm_ddtree import integration
from vllm_ddtree.config.sharing import check_sharing

SHARED = {"budget": 15, "mean_budget": 4}


def test_mean_budget() -> None:
    spec = build(SHARED).speculative_config
    assert (spec.budget, spec.mean_budget, spec.num_speculative_tokens) == (15, 4, 15)
    assert "budget=15 (mean 4)" in repr(spec)
    assert build({"budget": 15}).speculative_config.mean_budget is None


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"mean_budget": 4}, ["mean_budget=4", "give budget a number"]),
        ({"mean_budget": 4, "budget": "auto"}, ["mean_budget=4", "give budget a number"]),
        (
            {"mean_budget": 4, "budget_per_batch_size": [[1, 4, 7]]},
            ["mean_budget=4", "give budget a number"],
        ),
        ({"mean_budget": 15, "budget": 15}, ["mean_budget=15", "from 1 to 14", "budget=15"]),
        ({"mean_budget": 0, "budget": 15}, ["mean_budget=0", "from 1 to 14"]),
        ({"mean_budget": True, "budget": 15}, ["mean_budget=True", "whole number"]),
        ({"mean_budget": 1, "budget": 1}, ["mean_budget=1", "nothing to share"]),
    ],
)
def test_wrong_keys(keys: dict[str, Any], parts: list[str]) -> None:
    message = refusal(lambda: build(keys))
    for part in parts:
        assert part in message


def test_a_wrong_budget_is_named_itself() -> None:
    assert "budget=0 is not valid" in refusal(lambda: build({"mean_budget": 1, "budget": 0}))


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("model_config", "is_hybrid", True, "recurrent layers"),
        ("model_config", "use_mla", True, "latent attention"),
        ("model_config", "return_sampling_mask", True, "--return-sampling-mask"),
        ("", "lora_config", SimpleNamespace(), "--enable-lora"),
        ("", "kv_transfer_config", SimpleNamespace(), "--kv-transfer-config"),
        (
            "aux_output_config",
            "enable_return_routed_experts",
            True,
            "--enable-return-routed-experts",
        ),
        ("compilation_config", "cudagraph_mode", 2, "--enforce-eager"),
    ],
)
def test_engines_that_cannot_share(
    part: str, name: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sharing_config(monkeypatch)
    check_sharing(config)
    setattr(getattr(config, part) if part else config, name, value)
    message = refusal(lambda: check_sharing(config))
    assert message.startswith("speculative_config: mean_budget=4 is not valid for method ddtree: ")
    assert words in message
    config.speculative_config.mean_budget = None
    check_sharing(config)


def test_backends_that_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    config = sharing_config(monkeypatch, "FLASHINFER")
    message = refusal(lambda: check_sharing(config))
    assert "FLASH_ATTN, TRITON_ATTN or CPU_ATTN, not FLASHINFER" in message


def sharing_config(monkeypatch: pytest.MonkeyPatch, backend: str = "TRITON_ATTN") -> Any:
    """As much of a configuration as is looked at."""
    from vllm.config.compilation import CUDAGraphMode

    monkeypatch.setattr(integration, "target_backend", lambda config, asked: backend)
    return SimpleNamespace(
        speculative_config=SimpleNamespace(mean_budget=4),
        model_config=SimpleNamespace(is_hybrid=False, use_mla=False, return_sampling_mask=False),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
        attention_config=SimpleNamespace(backend=None),
        lora_config=None,
        kv_transfer_config=None,
    )
