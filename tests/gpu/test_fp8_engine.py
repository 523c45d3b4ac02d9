# SPDX-License-Identifier: Apache-2.0
"""fp8 caches and fp8 weights in vLLM's engine, with the small pair and CUDA graphs.

Half precision and fp8 round by the batch's shape, so a text may leave plain decoding's where the
target's two best tokens are nearly equal (see benchmarks/exactness.py). Elsewhere it may not.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read when vLLM first starts

from benchmarks.exactness import first_difference, read_prompts
from tests.conftest import Pair
from vllm_ddtree.testing.engine import Result, generate, open_engine

NUM_PROMPTS, MAX_TOKENS = 8, 128
# Of the log-probs of the target's two best tokens: what rounding moves them by is a fraction of it.
NEAR_TIE = 0.3
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.3,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "seed": 0,
}


@functools.cache
def prompts_of(target: Path) -> list[list[int]]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    prompts = read_prompts(NUM_PROMPTS, 64, tokenizer)
    assert len(prompts) == NUM_PROMPTS
    return prompts


def greedy(max_tokens: int = MAX_TOKENS, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def run_ddtree(pair: Pair, budget: int, cache_dtypes: set[Any], **engine: Any) -> Result:
    """The prompts' texts; the caches, target's and drafter's, must have these dtypes."""
    spec = {"method": "ddtree", "model": str(pair.drafter), "budget": budget}
    with open_engine(pair.target, spec, **ENGINE, **engine) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert {layer.kv_cache.dtype for layer in layers} == cache_dtypes
        assert {layer.is_draft_layer for layer in layers} == {False, True}
        result = generate(llm, prompts_of(pair.target), greedy())
    print(engine, "acceptance length", result.counters.acceptance_length)
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens
    return result


@functools.cache
def acceptance_with_bfloat16(pair: Pair, budget: int) -> float:
    import torch

    result = run_ddtree(pair, budget, {torch.bfloat16}, attention_backend="FLASH_ATTN")
    return result.counters.acceptance_length


def assert_plain_decoding(pair: Pair, texts: Sequence[list[int]], **engine: Any) -> None:
    """The texts are those of the same engine without speculation, but for near-ties."""
    prompts = prompts_of(pair.target)
    with open_engine(pair.target, None, **ENGINE, **engine) as llm:
        expected = generate(llm, prompts, greedy()).token_ids
        places = [first_difference(got, want) for got, want in zip(texts, expected, strict=True)]
        contexts = [
            prompt + want[:at]
            for prompt, want, at in zip(prompts, expected, places, strict=True)
            if at is not None
        ]
        scored = generate(llm, contexts, greedy(1, logprobs=5)).outputs if contexts else []
    gaps = []
    for output in scored:
        ranked = sorted((v.logprob for v in output.outputs[0].logprobs[0].values()), reverse=True)
        gaps.append(ranked[0] - ranked[1])
    print(engine, "first differences", places, "gaps", gaps)
    assert len(gaps) <= NUM_PROMPTS // 2
    assert max(gaps, default=0.0) < NEAR_TIE


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_fp8_cache(backend: str, small_pair: Pair) -> None:
    """Plain decoding's text with the same cache; the acceptance that a bfloat16 cache gives."""
    import torch

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 (e4m3) needs compute capability 8.9")
    if backend == "FLASH_ATTN":
        from vllm.v1.attention.backends.fa_utils import flash_attn_supports_kv_cache_dtype

        if not flash_attn_supports_kv_cache_dtype("fp8", head_size=128):
            pytest.skip("this GPU's FlashAttention reads no fp8 cache")
    engine = {"attention_backend": backend, "kv_cache_dtype": "fp8"}
    result = run_ddtree(small_pair, 31, {torch.uint8}, **engine)
    assert_plain_decoding(small_pair, result.token_ids, **engine)
    # Texts part at near-ties, and then differ in how easily they are drafted.
    assert result.counters.acceptance_length > 0.85 * acceptance_with_bfloat16(small_pair, 31)


def test_fp8_weights(small_pair: Pair) -> None:
    """Of the target alone, with one activation scale a token: rows do not depend on each other."""
    import torch

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 products need compute capability 8.9")
    engine = {"quantization": "fp8_per_channel"}
    result = run_ddtree(small_pair, 31, {torch.bfloat16}, **engine)
    assert_plain_decoding(small_pair, result.token_ids, **engine)
    # Another target's text, so to say: the drafter was trained for the weights before rounding.
    assert result.counters.acceptance_length > 0.7 * acceptance_with_bfloat16(small_pair, 31)
