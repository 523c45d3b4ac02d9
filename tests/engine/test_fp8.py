# SPDX-License-Identifier: Apache-2.0
"""--kv-cache-dtype fp8: the text of an engine whose cached keys and values are rounded to fp8.

vLLM's CPU kernels read fp8 caches on few processors only. So plain decoding keeps a float32 cache
here, of keys and values that are rounded before they are stored; DDTree's is one of fp8 bytes, and
the drafter's a float32 one, of another page size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import NANO
from tests.engine.harness import PROMPTS, ddtree, generate, greedy, open_engine, run_engine

ENGINE: dict[str, Any] = {"block_size": 32, "max_num_seqs": 4}


def requests() -> tuple[list[str], list[Any]]:
    params = [
        greedy(24),
        greedy(20, temperature=1.0, seed=1),
        greedy(22, temperature=0.6, seed=2, top_k=20),
    ]
    return [PROMPTS[5], PROMPTS[1], PROMPTS[3]], params


def store_rounded_rows(patch: pytest.MonkeyPatch) -> None:
    """Plain decoding's keys and values become numbers of fp8 (e4m3)."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    store = CPUAttentionBackendImpl.do_kv_cache_update

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)

    def update(self: Any, layer: Any, key: Any, value: Any, *args: Any) -> None:
        store(self, layer, rounded(key), rounded(value), *args)

    patch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", update)


def allow_any_processor(patch: pytest.MonkeyPatch) -> None:
    """vLLM's metadata builder plans kernels that trees do not use: for a float32 cache."""
    from vllm.v1.attention.backends import cpu_attn

    isa, plan = cpu_attn._get_attn_isa, cpu_attn.ops.cpu_attn_get_scheduler_metadata

    def get_isa(dtype: Any, block_size: int, head_size: Any, _: Any) -> str:
        return isa(dtype, block_size, head_size)

    def get_plan(**given: Any) -> torch.Tensor:
        return plan(**{**given, "kv_cache_dtype": "auto"})

    patch.setattr(cpu_attn, "_get_attn_isa", get_isa)
    patch.setattr(cpu_attn.ops, "cpu_attn_get_scheduler_metadata", get_plan)


def test_same_tokens_as_without_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    unrounded = run_engine(NANO.target, None, *requests(), **ENGINE).token_ids
    with monkeypatch.context() as patch:
        store_rounded_rows(patch)
        expected = run_engine(NANO.target, None, *requests(), **ENGINE).token_ids
    assert expected != unrounded, "rounding makes no difference"

    allow_any_processor(monkeypatch)
    # Trees, positions, slots and the bytes that move, after every step.
    monkeypatch.setenv("VLLM_DDTREE_CHECK", "1")
    spec = ddtree(NANO, 20, kv_cache_dtype="auto")
    with open_engine(NANO.target, spec, kv_cache_dtype="fp8", **ENGINE) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        dtypes = {(layer.is_draft_layer, layer.kv_cache.dtype) for layer in layers}
        assert dtypes == {(False, torch.uint8), (True, torch.float32)}
        result = generate(llm, *requests())
    assert result.token_ids == expected
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens
