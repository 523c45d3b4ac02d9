# SPDX-License-Identifier: Apache-2.0
"""Settings of an engine that DDTree cannot serve are refused by flag."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.config.building import build, refusal


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"pipeline_parallel_size": 2}, ["--pipeline-parallel-size=2", "set it to 1"]),
        ({"data_parallel_size": 2}, ["--data-parallel-size=2", "set it to 1"]),
        ({"watermark_config": {"key": 7711}}, ["--watermark-config={...}", "leave it out"]),
        (
            {"max_num_batched_tokens": 24, "max_num_seqs": 2, "enable_chunked_prefill": True},
            ["--max-num-batched-tokens=24", "budget=auto", "at least"],
        ),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["--kv-cache-dtype=fp8_e5m2", "set it to fp8"]),
        (
            {"compilation_config": {"pass_config": {"fuse_attn_quant": True}}},
            ["pass_config.fuse_attn_quant=True", "leave it out"],
        ),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_wrong_engines(more: dict[str, Any], parts: list[str]) -> None:
    message = refusal(lambda: build(**more))
    for part in ("ddtree", *parts) if "max_num_seqs" not in more else parts:
        assert part in message
    assert "7711" not in message, "a secret"


def test_adapters_need_a_step_for_all_trees() -> None:
    """vLLM's own demand for LoRA with speculation, in the plugin's words."""
    lora: dict[str, Any] = {"enable_lora": True, "max_num_seqs": 16}
    assert build(**lora, max_num_batched_tokens=1024).lora_config is not None
    message = refusal(lambda: build(**lora, max_num_batched_tokens=512))
    for part in (
        "--max-num-batched-tokens=512 is too small for --enable-lora",
        "budget=auto (up to 63) and --max-num-seqs=16",
        "raise it to 1024",
        "lower --max-num-seqs to 8",
        "set budget to 31 or less",
    ):
        assert part in message
    build({"budget": 31}, **lora, max_num_batched_tokens=512)
    message = refusal(lambda: build({"budget": 32}, **lora, max_num_batched_tokens=512))
    assert "budget=32 " in message and "raise it to 528" in message


def test_float16_and_an_fp8_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import fa_utils

    half: dict[str, Any] = {"dtype": "float16", "kv_cache_dtype": "fp8"}
    build(**half)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda: 3)
    message = refusal(lambda: build(**half))
    assert "--dtype=float16" in message and "use bfloat16" in message
    build({"kv_cache_dtype": "auto"}, **half)
    build(dtype="bfloat16", kv_cache_dtype="fp8")


@pytest.fixture
def fresh_environment() -> Iterator[None]:
    """vLLM reads its variables once an engine has started; here they are read again."""
    import vllm.envs as envs

    cached = getattr(envs.__getattr__, "cache_clear", None)
    if cached is not None:
        cached()
    yield
    if cached is not None:
        cached()


@pytest.mark.usefixtures("fresh_environment")
def test_the_v1_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    message = refusal(build)
    assert "V1 model runner" in message and "VLLM_USE_V2_MODEL_RUNNER=0" in message
