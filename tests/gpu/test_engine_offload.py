# SPDX-License-Identifier: Apache-2.0
"""KV blocks that leave the GPU and come back: vLLM's native offload, and a transfer over files.

Requests run one at a time, so that a second run has batches of the same shapes and the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS
from tests.engine.offload import drain, over_files
from tests.gpu.engines import ENGINE, GRAPHS, check_gaps, gaps, spec
from vllm_ddtree.testing.engine import Counters, Result, generate, open_engine

if TYPE_CHECKING:
    from vllm import LLM

TURNS: dict[str, Any] = {**ENGINE, **GRAPHS, "enable_prefix_caching": True}
DETAILS: dict[str, Any] = {"per_request_spec_decode_metrics": "detailed"}
BACKENDS: dict[str, dict[str, Any]] = {
    "native": {"kv_offloading_size": 0.5},
    # Generated tokens too, whose keys were moved at commits.
    "native, generated tokens": {
        "kv_offloading_size": 0.5,
        "kv_transfer_config": {"kv_connector_extra_config": {"offload_prompt_only": False}},
    },
    "simple": {
        "kv_transfer_config": {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 29},
        },
    },
}


def params(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def one_by_one(llm: LLM, prompts: list[list[int]], tokens: int) -> list[Result]:
    results = []
    for prompt in prompts:
        results.append(generate(llm, [prompt], params(tokens)))
        drain(llm)
    return results


def tokens_of(results: list[Result]) -> list[list[int]]:
    return [result.token_ids[0] for result in results]


def cached(results: list[Result]) -> list[int]:
    return [result.outputs[0].num_cached_tokens or 0 for result in results]


def rounds(results: list[Result]) -> list[list[int]]:
    metrics = [result.outputs[0].outputs[0].spec_decode_metrics for result in results]
    return [list(m.per_step_accepted) for m in metrics if m is not None]


def prompts_of(llm: LLM) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    return [tokenizer(text)["input_ids"] for text in (PROMPTS[5], PROMPTS[3] * 3, PROMPTS[2] * 4)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget", [31, "auto"])
def test_blocks_come_back_from_the_host(small_pair: Pair, backend: str, budget: int | str) -> None:
    keys = {**TURNS, **DETAILS, **BACKENDS[backend]}
    with open_engine(small_pair.target, spec(small_pair, budget), **keys) as llm:
        first = one_by_one(llm, prompts_of(llm), 70)
        prompts = [
            [*(r.outputs[0].prompt_token_ids or ()), *tokens, 17]
            for r, tokens in zip(first, tokens_of(first), strict=True)
        ]
        hit = one_by_one(llm, prompts, 48)
        assert llm.reset_prefix_cache()
        back = one_by_one(llm, prompts, 48)
        drain(llm)
        assert llm.reset_prefix_cache(reset_connector=True)
        cold = one_by_one(llm, prompts, 48)
        total = Counters.read(llm)
    print(backend, budget, total.acceptance_length, cached(hit), cached(back), cached(cold))
    print(rounds(hit), rounds(back), rounds(cold))
    assert min(cached(back)) > 0 and cached(cold) == [0] * len(prompts)
    if cached(back) == cached(hit):
        assert tokens_of(back) == tokens_of(hit)
        if budget != "auto":
            assert rounds(back) == rounds(hit)
    # A wrong context of the drafter's leaves the text right and the rounds short.
    per_round = [sum(map(sum, r)) / sum(map(len, r)) for r in map(rounds, (back, cold))]
    assert per_round[0] > 0.8 * per_round[1] > 0
    texts = list(zip(prompts, tokens_of(back), strict=True))
    check_gaps(gaps(small_pair, [*texts, *zip(prompts, tokens_of(cold), strict=True)]))


@pytest.mark.parametrize("prefill", ["ddtree", "dflash"])
def test_a_prefill_engine_and_a_decode_engine(
    small_pair: Pair, tmp_path: Path, prefill: str
) -> None:
    """The drafter's context comes with the target's, whichever of the two methods prefilled."""
    keys = {**ENGINE, "enforce_eager": True}
    ours = spec(small_pair, 31)
    theirs = {"method": "dflash", "model": str(small_pair.drafter), "num_speculative_tokens": 15}
    with open_engine(small_pair.target, ours, **keys, **DETAILS) as llm:
        prompts = prompts_of(llm)
        alone = one_by_one(llm, prompts, 48)
    first = ours if prefill == "ddtree" else theirs
    with open_engine(
        small_pair.target, first, **keys, kv_transfer_config=over_files(tmp_path, "kv_producer")
    ) as llm:
        one_by_one(llm, prompts, 1)
    with open_engine(
        small_pair.target,
        ours,
        **keys,
        **DETAILS,
        kv_transfer_config=over_files(tmp_path, "kv_consumer"),
    ) as llm:
        decoded = one_by_one(llm, prompts, 48)
    print(prefill, cached(decoded), rounds(decoded), rounds(alone))
    assert min(cached(decoded)) > 0, "nothing came from the prefill engine"
    per_round = [sum(map(sum, r)) / sum(map(len, r)) for r in map(rounds, (decoded, alone))]
    assert per_round[0] > 0.8 * per_round[1] > 0
    check_gaps(gaps(small_pair, list(zip(prompts, tokens_of(decoded), strict=True))))
