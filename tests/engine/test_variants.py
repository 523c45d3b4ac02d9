# SPDX-License-Identifier: Apache-2.0
"""Targets with sliding windows, logit soft-caps and attention sinks give the output of vLLM's own
attention.

Without speculation vLLM's own CPU kernels attend; with DDTree our attention does, so the windows'
edges, soft-caps and sinks of both must agree. Windows are shorter than the prompts and of either
side of tree depths; several KV cache groups; blocks outside a window are freed and used again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import NANO, Pair
from tests.engine import models
from tests.engine.harness import PROMPTS, ddtree, generate, greedy, open_engine, run_engine

ENGINE: dict[str, Any] = {"block_size": 32, "max_num_seqs": 5, "max_num_batched_tokens": 512}
# (prompt, tokens, sampling): the first fills several blocks.
REQUESTS: list[tuple[str, int, dict[str, Any]]] = [
    (PROMPTS[5], 18, {}),
    (PROMPTS[1], 15, {"temperature": 1.0, "seed": 1}),
    ("# Long, too.\n" + PROMPTS[5], 12, {"temperature": 0.6, "seed": 2, "top_p": 0.9, "top_k": 20}),
    (PROMPTS[3], 14, {}),
]


def all_windowed(folder: Path) -> Pair:
    """vLLM's Qwen3, every layer with the window of the model's config."""
    window: dict[str, Any] = {
        "sliding_window": 24,
        "use_sliding_window": True,
        "max_window_layers": 0,
    }
    return models.trained_pair(folder, **window, layer_types=["sliding_attention"] * 4)


def mixed(folder: Path) -> Pair:
    """Windowed layers (one window shorter than a branch) and full ones: several KV groups."""
    return models.varied_pair(folder, [24, None, 5, None], [None] * 4, [None] * 4)


def soft_capped(folder: Path) -> Pair:
    """As Gemma 2: soft-caps everywhere, windows in every other layer."""
    return models.varied_pair(folder, [24, None] * 2, [4.0] * 4, [None] * 4)


def with_sinks(folder: Path) -> Pair:
    """As gpt-oss: sinks everywhere, windows in every other layer."""
    return models.varied_pair(folder, [24, None] * 2, [None] * 4, [[0.5, 3.0]] * 4)


def batch() -> tuple[list[str], list[Any]]:
    prompts, tokens, sampling = zip(*REQUESTS, strict=True)
    return list(prompts), [greedy(n, **more) for n, more in zip(tokens, sampling, strict=True)]


@functools.cache
def nano_plain() -> list[list[int]]:
    return run_engine(NANO.target, None, *batch(), **ENGINE).token_ids


@pytest.mark.parametrize(
    ("kind", "budget"),
    [(all_windowed, 20), (mixed, 5), (soft_capped, 20), (with_sinks, 5)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_same_tokens_as_without_speculation(
    kind: Callable[[Path], Pair], budget: int, tmp_path: Path
) -> None:
    pair = kind(tmp_path)
    expected = run_engine(pair.target, None, *batch(), **ENGINE)
    assert expected.token_ids != nano_plain(), "the variant makes no difference"
    result = run_engine(pair.target, ddtree(pair, budget), *batch(), **ENGINE)
    assert result.token_ids == expected.token_ids
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens


def llama(folder: Path) -> Pair:
    """vLLM's own Llama with windowed and full layers."""
    from transformers import LlamaConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    return models.random_pair(
        folder,
        LlamaConfig(
            vocab_size=models.VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            initializer_range=0.3,
            layer_types=kinds,
            sliding_window=11,
            bos_token_id=0,
            eos_token_id=0,
        ),
    )


def gpt_oss(folder: Path) -> Pair:
    """vLLM's own gpt-oss: sinks in every layer, windows in every other, experts."""
    from transformers import GptOssConfig

    return models.random_pair(
        folder,
        GptOssConfig(
            vocab_size=models.VOCABULARY,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=1024,
            initializer_range=0.3,
            sliding_window=11,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        ),
    )


@pytest.mark.parametrize(
    ("kind", "budget"),
    [(llama, 20), (gpt_oss, 5), (models.qwen3_moe, 20)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_targets_of_vllm(kind: Callable[[Path], Pair], budget: int, tmp_path: Path) -> None:
    pair = kind(tmp_path)
    prompts = [[(7 * i * i + i) % models.VOCABULARY for i in range(n)] for n in (70, 3, 33)]
    params = [
        greedy(16, detokenize=False),
        greedy(14, detokenize=False, temperature=1.0, seed=5),
        greedy(15, detokenize=False, temperature=0.7, seed=6, top_k=12),
    ]
    engine = {**ENGINE, "skip_tokenizer_init": True}
    expected = run_engine(pair.target, None, prompts, params, **engine)
    result = run_engine(pair.target, ddtree(pair, budget), prompts, params, **engine)
    assert result.token_ids == expected.token_ids
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens


def poison_dead_blocks(llm: Any, state: Any) -> int:
    """Fill every KV block that no request holds with NaN, in all caches; returns their number."""
    cache_manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    live = {
        block.block_id
        for manager in cache_manager.coordinator.single_type_managers
        for blocks in manager.req_to_blocks.values()
        for block in blocks
        if not block.is_null
    }
    # Freed blocks go to the end of the queue where prefixes are cached: they stay dead for long.
    assert cache_manager.enable_caching
    layers = state.vllm_config.compilation_config.static_forward_context.values()
    num_blocks = cache_manager.block_pool.num_gpu_blocks
    dead = torch.tensor([i for i in range(num_blocks) if i not in live])
    for layer in layers:
        layer.kv_cache[dead] = float("nan")
    return len(dead)


def test_freed_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies before a window is freed, and nobody reads it: with asynchronous scheduling, whose
    lengths run ahead by whole trees, and with prompts in chunks beside trees.
    """
    from vllm.platforms import current_platform

    from vllm_ddtree.model_state import DDTreeModelState
    from vllm_ddtree.round import plan

    # Trees beside prefills, not chains.
    monkeypatch.setattr(plan, "MIXED_TREE_TOKENS", 0)
    pair = mixed(tmp_path)
    expected = run_engine(pair.target, None, *batch(), **ENGINE)
    check = current_platform.check_and_update_config
    prepare_attn = DDTreeModelState.prepare_attn
    freed = 0

    def keep_async(_: Any, vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(keep_async))
    keys = {**ENGINE, "max_num_batched_tokens": 96, "enable_prefix_caching": True}
    with open_engine(pair.target, ddtree(pair, 12), **keys) as llm:
        core = llm.llm_engine.engine_core.engine_core
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
        assert len(managers) > 1

        def poison(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal freed
            poison_dead_blocks(llm, self)
            freed += sum(
                block.is_null
                for manager in managers
                for blocks in manager.req_to_blocks.values()
                for block in blocks
            )
            return prepare_attn(self, *args, **kwargs)

        monkeypatch.setattr(DDTreeModelState, "prepare_attn", poison)
        result = generate(llm, *batch())
    assert freed > 0, "no block was ever freed"
    assert result.token_ids == expected.token_ids
    assert result.counters.num_accepted_tokens > 0


def accepted(result: Any) -> list[list[int]]:
    """Accepted nodes of each round of each request."""
    return [list(o.outputs[0].spec_decode_metrics.per_step_accepted) for o in result.outputs]


def test_prefix_caching(tmp_path: Path) -> None:
    """Hits over windowed and full groups: the same text, and the same rounds as a full prefill."""
    pair = mixed(tmp_path)
    prompts = [PROMPTS[5], PROMPTS[5] + " x", PROMPTS[5]]
    params = [greedy(10), greedy(10, temperature=0.9, seed=3), greedy(8)]
    expected = run_engine(pair.target, None, prompts, params, **ENGINE)
    metrics = {"per_request_spec_decode_metrics": "detailed"}
    with open_engine(
        pair.target, ddtree(pair, 12), enable_prefix_caching=True, **metrics, **ENGINE
    ) as llm:
        rounds = []
        for _ in range(2):
            result = generate(llm, prompts, params)
            assert result.token_ids == expected.token_ids
            rounds.append(accepted(result))
        assert min(output.num_cached_tokens for output in result.outputs) >= 32
    assert rounds[0] == rounds[1]
    assert result.counters.num_accepted_tokens > 0


def test_one_kv_group_or_several(tmp_path: Path) -> None:
    """Without the hybrid KV cache manager windowed layers lie in a group with full ones, and with
    the drafter's: the same text in the same rounds, so the drafter reads the same context.
    """
    pair = soft_capped(tmp_path)
    keys = {**ENGINE, "per_request_spec_decode_metrics": "detailed"}
    one, several = (
        run_engine(
            pair.target,
            ddtree(pair, 12),
            *batch(),
            disable_hybrid_kv_cache_manager=disable,
            **keys,
        )
        for disable in (True, False)
    )
    assert one.token_ids == several.token_ids
    assert accepted(one) == accepted(several)
    assert one.counters.num_accepted_tokens > 0
