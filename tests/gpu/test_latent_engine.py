# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine gives plain decoding's texts of small random targets with multi-head latent
attention, on each of its backends that DDTree supports, without and with FULL CUDA graphs.

float16, whose rounding is small beside a random target's choices: texts are those of plain decoding
on the same backend, up to near-ties of the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine import models
from tests.engine.known import known_drafts, model_runner, on_chain, sibling
from vllm_ddtree.testing.engine import Result, generate, open_engine, run_engine

VOCABULARY = 96
"""More than a tree has rows: vLLM warms up with prompts 0, 1, 2, ... of that length."""
LATENT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
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
    "dtype": "float16",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "long_prefill_token_threshold": 128,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 1 << 30,
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
        n_routed_experts=4,
        num_experts_per_tok=4,  # all: no near-ties among experts
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
    )
    return models.random_pair(folder, config)


EAGER: dict[str, Any] = {"enforce_eager": True}
GRAPHS: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
LENS = (300, 3, 33, 16, 1, 120, 64, 7, 40, 9)
"""Prompts shorter and longer than a tree and a piece, more requests than run at once."""
PROMPTS = [[(7 * i * i + i * n) % VOCABULARY for i in range(n)] for n in LENS]
MAX_TOKENS = 48


@pytest.fixture(autouse=True)
def tensors_on_device() -> Iterator[None]:
    """vLLM chooses where its tensors lie: no default device, unlike for kernel tests."""
    yield


def params(**keys: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, **keys
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Pair, Result]]:
    """(kind of target, backend) -> the pair and the texts of plain decoding, made once."""
    pairs: dict[Any, Pair] = {}
    results: dict[Any, Result] = {}

    def get(kind: Callable[[Path], Pair], backend: str) -> tuple[Pair, Result]:
        if kind not in pairs:
            pairs[kind] = kind(tmp_path_factory.mktemp(kind.__name__))
        if (kind, backend) not in results:
            results[kind, backend] = run_engine(
                pairs[kind].target,
                None,
                PROMPTS,
                params(logprobs=5),
                attention_backend=backend,
                **EAGER,
                **ENGINE,
            )
        return pairs[kind], results[kind, backend]

    return get


def assert_same_texts(result: Result, expected: Result) -> None:
    """Where a text leaves plain decoding's, the target's own choice was a near-tie there."""
    for got, want, output in zip(
        result.token_ids, expected.token_ids, expected.outputs, strict=True
    ):
        assert len(got) == len(want) == MAX_TOKENS
        at = next((i for i in range(MAX_TOKENS) if got[i] != want[i]), None)
        if at is not None:
            choices = output.outputs[0].logprobs[at]
            assert got[at] in choices, f"token {at} is none of the target's five best"
            assert choices[want[at]].logprob - choices[got[at]].logprob < 0.05
    assert num_equal(result, expected) >= len(PROMPTS) // 2


def num_equal(result: Result, expected: Result) -> int:
    return sum(a == b for a, b in zip(result.token_ids, expected.token_ids, strict=True))


@pytest.mark.parametrize(
    ("backend", "mode", "kind", "budget", "named"),
    [
        ("TRITON_MLA", EAGER, deepseek_v2, 5, True),
        ("TRITON_MLA", GRAPHS, deepseek_v2, 31, True),
        ("FLASH_ATTN_MLA", EAGER, deepseek_v3, 15, False),
        ("FLASH_ATTN_MLA", GRAPHS, deepseek_v3, 15, True),
        ("FLASH_ATTN_MLA", GRAPHS, deepseek_v3, 63, False),
        ("FLASHMLA", EAGER, deepseek_v2, 31, True),
        ("FLASHMLA", GRAPHS, deepseek_v2, 7, True),
    ],
    ids=lambda value: getattr(
        value, "__name__", "graphs" if value is GRAPHS else "eager" if value is EAGER else None
    ),
)
def test_texts_of_plain_decoding(
    backend: str,
    mode: dict[str, Any],
    kind: Callable[[Path], Pair],
    budget: int,
    named: bool,
    plain: Callable[..., tuple[Pair, Result]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its own drafter's trees, and with trees that hold what the target says, in a row or on
    branches: these are accepted to the end, round after round.

    named: whether the backend is asked for by name, or is vLLM's own choice (on Hopper).
    """
    import torch
    from vllm.config.compilation import CUDAGraphMode

    from vllm_ddtree.proposer.speculator import DDTreeSpeculator

    if backend != "TRITON_MLA" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"{backend} needs Hopper")
    init: Any = DDTreeSpeculator.init_cudagraph_manager
    # Known drafts are put in by Python, which a draft's graph would not run.
    monkeypatch.setattr(
        DDTreeSpeculator, "init_cudagraph_manager", lambda self, _: init(self, CUDAGraphMode.NONE)
    )
    pair, expected = plain(kind, backend)
    known = [p + tokens for p, tokens in zip(PROMPTS, expected.token_ids, strict=True)]
    spec = {"method": "ddtree", "model": str(pair.drafter), "budget": budget}
    asked = {"attention_backend": backend} if named else {}
    with open_engine(pair.target, spec, **asked, **mode, **ENGINE) as llm:
        config = llm.llm_engine.vllm_config
        assert config.attention_config.backend.name == backend
        replays = count_replays(llm)
        own = generate(llm, PROMPTS, params())
        with known_drafts(llm, known, on_chain):
            in_a_row = generate(llm, PROMPTS, params())
        with known_drafts(llm, known, sibling):
            on_branches = generate(llm, PROMPTS, params())
    for result in (own, in_a_row, on_branches):
        assert_same_texts(result, expected)
        assert result.counters.num_accepted_tokens > 0
    # Of a text that stays plain decoding's, each round gives a whole path and the next token; of
    # another no more is known than where it left.
    path = min(budget, pair.block_size - 1)
    rounds = -(-(MAX_TOKENS - 1) // (path + 1)) + 1
    equal = num_equal(in_a_row, expected)
    assert in_a_row.counters.num_drafts <= equal * rounds + (len(PROMPTS) - equal) * MAX_TOKENS
    assert on_branches.counters.acceptance_length > own.counters.acceptance_length
    verified = [rows for rows in replays if rows == budget + 1]
    assert bool(verified) is (mode is GRAPHS)


def count_replays(llm: Any) -> list[int]:
    """Rows a request of each FULL graph that is replayed from now on."""
    rows: list[int] = []
    manager = model_runner(llm).cudagraph_manager
    if manager is None:
        return rows
    replay = manager.run_fullgraph

    def run_fullgraph(desc: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(desc.num_tokens // desc.num_reqs)
        return replay(desc, *args, **kwargs)

    manager.run_fullgraph = run_fullgraph
    return rows
