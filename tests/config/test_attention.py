# SPDX-License-Identifier: Apache-2.0
"""The target gets an attention backend that verifies trees, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.building import TARGET, build, refusal


class Named:
    """Stands for an attention backend's class."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_name(self) -> str:
        return self.name


@pytest.mark.parametrize(
    ("asked", "platform", "chosen"),
    [
        # Hopper; with a block size of 8, say; Blackwell; older.
        (None, ["FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"], "FLASH_ATTN_MLA"),
        (None, ["FLASHMLA", "TRITON_MLA"], "FLASHMLA"),
        (None, ["FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA"], "TRITON_MLA"),
        (None, ["TRITON_MLA"], "TRITON_MLA"),
        ("TRITON_MLA", ["FLASH_ATTN_MLA", "TRITON_MLA"], "TRITON_MLA"),
        ("FLASHMLA", ["FLASH_ATTN_MLA", "FLASHMLA"], "FLASHMLA"),
        (None, ["FLASHINFER_MLA"], ["for which vLLM has FLASHINFER_MLA", "use method dflash"]),
        (None, [], ["for which vLLM has no backend", "use method dflash"]),
        ("CUTLASS_MLA", ["CUTLASS_MLA"], ["--attention-backend=CUTLASS_MLA", "leave it out"]),
        ("FLASH_ATTN", ["FLASH_ATTN_MLA"], ["--attention-backend=FLASH_ATTN ", "leave it out"]),
    ],
)
def test_the_backend_of_a_latent_target(
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    platform: list[str],
    chosen: str | list[str],
) -> None:
    """Nano with multi-head latent attention, on a platform with these backends, its own choice
    first.
    """
    from vllm.config import get_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_ddtree.config.engine import finish_engine_config

    args, config = EngineArgs(model=str(TARGET)), build()
    attention = config.attention_config

    def get_attn_backend(head_size: int, *args: Any, use_mla: bool, num_heads: int) -> Named:
        assert use_mla and (head_size, num_heads) == (
            config.model_config.get_head_size(),
            config.model_config.get_num_attention_heads(config.parallel_config),
        )
        assert get_current_vllm_config() is config
        backend = attention.backend.name if attention.backend else [*platform, ""][0]
        if backend not in platform:
            raise ValueError("not valid")
        return Named(backend)

    monkeypatch.setattr(selector, "get_attn_backend", get_attn_backend)
    monkeypatch.setattr(type(config.model_config), "use_mla", property(lambda _: True))
    attention.backend = AttentionBackendEnum[asked] if asked else None
    if isinstance(chosen, str):
        finish_engine_config(args, config)
        assert attention.backend is AttentionBackendEnum[chosen]
        return
    message = refusal(lambda: finish_engine_config(args, config))
    supported = "FLASH_ATTN_MLA, FLASHMLA or TRITON_MLA"
    for part in (f"target {str(TARGET)!r}", "latent attention", supported, *chosen):
        assert part in message


@pytest.mark.parametrize(
    ("platform", "chosen"),
    [
        (["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"], None),  # Hopper: vLLM's own, by layer
        (["FLASHINFER", "FLASH_ATTN", "TRITON_ATTN"], "FLASH_ATTN"),  # Blackwell
        (["FLASHINFER", "TRITON_ATTN"], "TRITON_ATTN"),
        (["FLEX_ATTENTION"], ["FLEX_ATTENTION", "not FLASH_ATTN", "use method dflash"]),
    ],
)
def test_the_backend_of_other_targets(
    monkeypatch: pytest.MonkeyPatch, platform: list[str], chosen: str | list[str] | None
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention import selector

    from vllm_ddtree.config.engine import finish_engine_config

    args, config = EngineArgs(model=str(TARGET)), build()
    attention = config.attention_config

    def get_attn_backend(*args: Any, use_mla: bool, **kwargs: Any) -> Named:
        assert not use_mla
        backend = attention.backend.name if attention.backend else platform[0]
        if backend not in platform:
            raise ValueError("not valid")
        return Named(backend)

    monkeypatch.setattr(selector, "get_attn_backend", get_attn_backend)
    assert attention.backend is None
    if isinstance(chosen, list):
        message = refusal(lambda: finish_engine_config(args, config))
        assert all(part in message for part in chosen)
        return
    finish_engine_config(args, config)
    assert (attention.backend.name if attention.backend else None) == chosen


@pytest.mark.parametrize(
    ("asked", "taken"),
    [("FLASH_ATTN", True), ("TRITON_ATTN", True), ("FLASHINFER", True), ("FLEX_ATTENTION", False)],
)
def test_a_backend_that_is_named(asked: str, taken: bool) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_ddtree.config.engine import finish_engine_config

    args, config = EngineArgs(model=str(TARGET)), build()
    config.attention_config.backend = AttentionBackendEnum[asked]
    if taken:
        finish_engine_config(args, config)
        assert config.attention_config.backend is AttentionBackendEnum[asked]
        return
    message = refusal(lambda: finish_engine_config(args, config))
    assert f"--attention-backend={asked}: use FLASH_ATTN or TRITON_ATTN" in message


def test_this_platform_has_no_backend_for_trees_in_latents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own selector: the CPU's answer, whatever is asked for, is its own backend."""
    from vllm_ddtree import integration

    config = build()
    before = config.attention_config.backend
    assert integration.target_backend(config, None) == "CPU_ATTN"
    monkeypatch.setattr(type(config.model_config), "use_mla", property(lambda _: True))
    for asked in (None, "FLASH_ATTN_MLA", "TRITON_MLA"):
        assert integration.target_backend(config, asked) in ("CPU_MLA", "AMX_MLA")
    assert config.attention_config.backend is before
