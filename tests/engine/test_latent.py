# SPDX-License-Identifier: Apache-2.0
"""Targets with multi-head latent attention (MLA) give the output that vLLM's own attention gives.

Without speculation vLLM's own CPU backend attends (latents of 512 + 64, blocks of 16, whole prompts
only). With DDTree TRITON_MLA does, which the CPU platform never selects: here it is made to, and
its kernels, vLLM's for single rows and ours for trees, run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine import models
from tests.engine.harness import ddtree, generate, greedy, open_engine, run_engine
from tests.engine.ranks import record, rounds

ENGINE: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "skip_tokenizer_init": True}
LATENT: dict[str, Any] = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 24,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture
def triton_mla(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Lets the CPU platform take TRITON_MLA when asked to, with blocks of 32 and prompts in chunks
    (its own backend's limits, which it sets for every MLA target). Both engines get the mended
    rotary embedding. The parameter: asynchronous scheduling, whose lengths on the host are bounds.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    platform = type(current_platform)
    select, update = current_platform.get_attn_backend_cls, current_platform.check_and_update_config
    backend = AttentionBackendEnum.TRITON_MLA

    def get_attn_backend_cls(
        _: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_mla and selected_backend == backend:
            return backend.get_path()
        return select(selected_backend, attn_selector_config, num_heads)

    def check_and_update_config(_: Any, config: Any) -> None:
        scheduler, cache = config.scheduler_config, config.cache_config
        asked = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        caching = cache.enable_prefix_caching
        update(config)
        # Workers are to have what is patched here; the platform asks for "spawn".
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        if config.speculative_config is not None:  # the drafter's part of the configuration, too
            cache.block_size, cache.enable_prefix_caching = 32, caching
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked
            scheduler.async_scheduling = request.param

    monkeypatch.setattr(platform, "get_attn_backend_cls", classmethod(get_attn_backend_cls))
    monkeypatch.setattr(platform, "check_and_update_config", classmethod(check_and_update_config))
    # vLLM's CPU kernel turns queries [T, heads, rope] and strided keys by other rows' angles.
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)
    # vLLM has no CPU form of the kernel that writes a latent cache.
    monkeypatch.setattr(TritonMLAImpl, "do_kv_cache_update", CPUMLAImpl.do_kv_cache_update)
    return request.param


def deepseek_v3(folder: Path) -> Pair:
    """Experts in one of three layers, queries with a latent of their own; Kimi-K2's text model is
    of this class.
    """
    from transformers import DeepseekV3Config

    return models.random_pair(
        folder,
        DeepseekV3Config(
            **LATENT,
            q_lora_rank=48,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=2,
            topk_method="noaux_tc",
        ),
    )


def deepseek_v2(folder: Path) -> Pair:
    from transformers import DeepseekV2Config

    return models.random_pair(
        folder, DeepseekV2Config(**LATENT, q_lora_rank=None, first_k_dense_replace=3)
    )


@pytest.mark.parametrize(
    ("kind", "budget", "backend", "triton_mla"),
    [(deepseek_v3, 5, "TRITON_MLA", False), (deepseek_v2, 20, None, True)],
    indirect=["triton_mla"],
    ids=["deepseek_v3-5", "deepseek_v2-20-asynchronous"],
)
def test_same_tokens_as_without_speculation(
    kind: Callable[[Path], Pair],
    budget: int,
    backend: str | None,
    triton_mla: bool,
    tmp_path: Path,
) -> None:
    """`backend` None: of what DDTree supports, TRITON_MLA is the one that this platform has."""
    pair = kind(tmp_path)
    prompts = [[(7 * i * i + i) % models.VOCABULARY for i in range(n)] for n in (70, 3, 33, 16, 1)]
    params = [
        greedy(16, detokenize=False),
        greedy(13, detokenize=False, temperature=1.0, seed=5),
        greedy(14, detokenize=False, temperature=0.7, seed=6, top_k=12),
        greedy(6, detokenize=False),
        greedy(11, detokenize=False),
    ]
    expected = run_engine(pair.target, None, prompts, params, attention_backend="CPU_MLA", **ENGINE)
    with open_engine(
        pair.target,
        ddtree(pair, budget),
        attention_backend=backend,
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        **ENGINE,
    ) as llm:
        config = llm.llm_engine.vllm_config
        assert config.scheduler_config.async_scheduling is triton_mla
        assert config.attention_config.backend.name == "TRITON_MLA"
        result = generate(llm, prompts, params)
    assert result.token_ids == expected.token_ids
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens


@pytest.mark.parametrize("triton_mla", [False], indirect=True)
def test_two_ranks(triton_mla: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads spread over both, every rank with all latents: one rank's tokens, and the same trees on
    both in every round. (vLLM's CPU engine has no experts on several ranks.)"""
    pair = deepseek_v3(tmp_path)
    prompts = [[(5 * i * i + i) % models.VOCABULARY for i in range(n)] for n in (70, 3, 33)]
    params = [
        greedy(10, detokenize=False),
        greedy(9, detokenize=False, temperature=1.0, seed=5),
        greedy(6, detokenize=False),
    ]
    expected = run_engine(pair.target, None, prompts, params, attention_backend="CPU_MLA", **ENGINE)
    monkeypatch.setenv("VLLM_DDTREE_CHECK", "1")
    with open_engine(
        pair.target,
        ddtree(pair, 5),
        attention_backend="TRITON_MLA",
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        tensor_parallel_size=2,
        **ENGINE,
    ) as llm:
        llm.collective_rpc(record)
        result = generate(llm, prompts, params)
        assert rounds(llm) > 5
    assert result.token_ids == expected.token_ids
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens
