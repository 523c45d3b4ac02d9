# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine with a small random target with multi-head latent attention, on TRITON_MLA and with
CUDA graphs: what DDTree emits are the target's own choices.

TRITON_MLA computes in 16 bits only, so tokens are not compared with another run's: the engine
without speculation reads prompt and text anew and says what it would have chosen at each place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read when vLLM first starts

from tests.conftest import Pair
from tests.engine import models
from vllm_ddtree.testing.engine import run_engine

LATENT: dict[str, Any] = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "gpu_memory_utilization": 0.3,
    "attention_backend": "TRITON_MLA",
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "enable_prefix_caching": False,
    "seed": 0,
}


def deepseek_v2(folder: Path) -> Pair:
    from transformers import DeepseekV2Config

    config = DeepseekV2Config(**LATENT, q_lora_rank=None, first_k_dense_replace=4)
    return models.random_pair(folder, config)


def deepseek_v3(folder: Path) -> Pair:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        **LATENT,
        q_lora_rank=64,
        moe_intermediate_size=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
    )
    return models.random_pair(folder, config)


@pytest.mark.parametrize(
    ("kind", "budget"),
    [(deepseek_v2, 5), (deepseek_v2, 31), (deepseek_v3, 15)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_targets_own_choices(kind: Callable[[Path], Pair], budget: int, tmp_path: Path) -> None:
    """Prompts shorter and longer than a tree and a batch, more requests than fit at once."""
    from vllm import SamplingParams

    pair = kind(tmp_path)
    lens = (300, 3, 33, 16, 1, 120, 64, 7, 40, 9)
    prompts = [[(7 * i * i + i * n) % models.VOCABULARY for i in range(n)] for n in lens]
    keys: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    spec = {"method": "ddtree", "model": str(pair.drafter), "budget": budget}
    result = run_engine(pair.target, spec, prompts, SamplingParams(max_tokens=48, **keys), **ENGINE)
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens

    whole = [prompt + tokens for prompt, tokens in zip(prompts, result.token_ids, strict=True)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, **keys)
    judged = run_engine(pair.target, None, whole, params, **ENGINE)
    gaps = []
    for output, prompt, tokens in zip(judged.outputs, prompts, result.token_ids, strict=True):
        assert len(tokens) == 48
        for place, token in enumerate(tokens, start=len(prompt)):
            choices = output.prompt_logprobs[place]
            best = max(choice.logprob for choice in choices.values())
            gaps.append(best - choices[token].logprob)
    # Logits differ by rounding between the two engines; another token's is far off.
    assert sum(gap > 0 for gap in gaps) < 0.1 * len(gaps)
    assert max(gaps) < 0.3
