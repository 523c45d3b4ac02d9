# SPDX-License-Identifier: Apache-2.0
"""A target with gated-delta-net layers, in Qwen3.5's shape and small, gives its own texts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine import models
from tests.gpu.engines import (
    ENGINE,
    GRAPHS,
    UNTRAINED,
    check_gaps,
    count_replays,
    gaps,
    kernels_compiled,
    spec,
)
from vllm_ddtree.testing.engine import Result, generate, open_engine

TOKENS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    # FlashInfer's prefill is compiled at run time.
    "additional_config": {"gdn_prefill_backend": "triton"},
}
# Long ones among them: chunks of a prefill share steps with trees.
LENS = (900, 3, 33, 16, 1, 120, 64, 7)
PROMPTS = [[(7 * i * i + i * n) % models.VOCABULARY for i in range(n)] for n in LENS]
EAGER: dict[str, Any] = {"enforce_eager": True}
ALIGNED: dict[str, Any] = {**GRAPHS, "enable_prefix_caching": True}
# name -> (budget, engine arguments, whether whole verify steps are graphs)
ENGINES: dict[str, tuple[int | str, dict[str, Any], bool]] = {
    "graphs": (15, GRAPHS, True),
    "compiled": (15, {}, True),
    "auto": ("auto", {**GRAPHS, "max_num_batched_tokens": 2048}, True),
    "prefix caching": (15, ALIGNED, True),
    "bfloat16 states": (15, {**GRAPHS, "mamba_ssm_cache_dtype": "bfloat16"}, True),
    "eager, two blocks of rows": (100, EAGER, False),
}


@pytest.fixture(scope="module")
def hybrid_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return models.qwen3_5(
        tmp_path_factory.mktemp("hybrid"),
        hidden_size=256,
        intermediate_size=256,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=2048,
        initializer_range=0.15,
    )


def served(pair: Pair, name: str) -> Result:
    from vllm import SamplingParams

    budget, more, whole = ENGINES[name]
    params = [
        SamplingParams(temperature=0, max_tokens=8 * i, ignore_eos=True, detokenize=False)
        for i in range(1, len(LENS) + 1)
    ]
    engine = {**ENGINE, **TOKENS, **more}
    speculation = spec(pair, budget)
    if engine["enable_prefix_caching"]:
        # Else vLLM leaves out the last block of a hit, of the two that the longest prompt has.
        speculation["disable_eagle_block_drop"] = True
    with open_engine(pair.target, speculation, **engine) as llm:
        replays = count_replays(llm)
        with kernels_compiled() as compiled:
            result = generate(llm, PROMPTS, params)
            again = generate(llm, PROMPTS, params)
        if engine["enable_prefix_caching"]:
            assert again.outputs[0].num_cached_tokens > 0
    print(name, result.counters.acceptance_length, dict(replays), compiled)
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens
    assert bool(replays) == whole
    result.token_ids.extend(again.token_ids)
    return result


def test_texts_are_the_targets_own(hybrid_pair: Pair) -> None:
    for name in ENGINES:
        result = served(hybrid_pair, name)
        texts = list(zip([*PROMPTS, *PROMPTS], result.token_ids, strict=True))
        states = {key: ENGINES[name][1].get(key, "auto") for key in ("mamba_ssm_cache_dtype",)}
        check_gaps(gaps(hybrid_pair, texts, **TOKENS, **states), **UNTRAINED)


def test_states_take_what_plain_decoding_takes(hybrid_pair: Pair) -> None:
    """Blocks of the KV cache that a request needs, and tokens that it holds, at two budgets."""
    tokens = []
    for speculation in (None, spec(hybrid_pair, 7), spec(hybrid_pair, 63)):
        with open_engine(hybrid_pair.target, speculation, **{**ENGINE, **TOKENS, **EAGER}) as llm:
            runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
            groups = runner.kv_cache_config.kv_cache_groups
            tokens.append(
                {
                    (group.kv_cache_spec.shapes, group.kv_cache_spec.num_speculative_blocks)
                    for group in groups
                    if hasattr(group.kv_cache_spec, "num_speculative_blocks")
                }
            )
    assert tokens[0] == tokens[1] == tokens[2] and tokens[0]


def test_sleep(hybrid_pair: Pair) -> None:
    """States and what points to them are there again when the engine wakes."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    engine = {**ENGINE, **TOKENS, **ALIGNED, "enable_sleep_mode": True}
    with open_engine(hybrid_pair.target, spec(hybrid_pair, 15), **engine) as llm:

        def tokens() -> list[Any]:
            # One at a time: no batch whose shape depends on when a request came.
            return [generate(llm, [prompt], params).token_ids for prompt in PROMPTS[:4]]

        expected = tokens()
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up(tags=["weights"])
            if level == 2:
                llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])
            assert tokens() == expected, level
