# SPDX-License-Identifier: Apache-2.0
"""KV blocks that leave the engine and come back hold the target's and the drafter's keys.

Offload to host memory, by vLLM's connector with copies of our own (offload.py); transfer from a
prefill engine to a decode engine, by vLLM's ExampleConnector, over files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine import offload
from tests.engine.harness import (
    PROMPTS,
    Result,
    ddtree,
    generate,
    greedy,
    keep_async,
    open_engine,
    run_engine,
)

LONG = PROMPTS[5]  # 101 tokens of nano
BLOCK = 32
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}
ENGINE: dict[str, Any] = {"block_size": BLOCK, "enable_prefix_caching": True}
DETAILS: dict[str, Any] = {"per_request_spec_decode_metrics": "detailed"}


def rounds(result: Result) -> list[list[int]]:
    """Accepted nodes of each round of each request; empty draft rows are no round."""
    metrics = [output.outputs[0].spec_decode_metrics for output in result.outputs]
    return [
        [n for n, drafted in zip(m.per_step_accepted, m.per_step_drafted, strict=True) if drafted]
        for m in metrics
        if m is not None
    ]


def cached(result: Result) -> list[int]:
    return [output.num_cached_tokens or 0 for output in result.outputs]


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_blocks_come_back_from_the_host(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch, scheduling: str
) -> None:
    """A second turn needs blocks of the first one's prompt and of its text, whose keys were moved
    at commits.

    The first request ends where a block ends. That block's last slot holds a rejected draft's keys,
    if any, and must not be stored (vllm-project/vllm#54288). Its second turn has one token to
    compute after a load, to which vLLM adds empty draft rows.
    """
    if scheduling == "async":
        keep_async(monkeypatch)
    params = [greedy(5 * BLOCK - 101), greedy(66, **SEEDED)]
    turn = [greedy(24), greedy(20, **SEEDED)]
    with open_engine(
        nano_pair.target, ddtree(nano_pair, 15), kv_transfer_config=offload.config(),
        **ENGINE, **DETAILS,
    ) as llm:  # fmt: skip
        first = generate(llm, [LONG, PROMPTS[3]], params)
        outputs = zip(first.outputs, first.token_ids, strict=True)
        prompts = [[*(o.prompt_token_ids or ()), *tokens, 17] for o, tokens in outputs]
        assert len(prompts[0]) == 5 * BLOCK + 1
        hit = generate(llm, prompts, turn)
        worker = offload.HostWorker.latest
        assert worker is not None
        offload.drain(llm)
        before = worker.num_loaded  # at most the last block of each, which a hit leaves out
        assert before <= len(prompts) and llm.reset_prefix_cache()
        back = generate(llm, prompts, turn)
        loaded = worker.num_loaded - before
        offload.drain(llm)
        assert llm.reset_prefix_cache(reset_connector=True)
        cold = generate(llm, prompts, turn)
        assert worker.num_loaded == before + loaded
    assert cached(hit) == [4 * BLOCK, 2 * BLOCK] and cached(back) == [5 * BLOCK, 2 * BLOCK]
    assert cached(cold) == [0, 0]
    assert loaded * BLOCK == sum(cached(back))
    plain = run_engine(nano_pair.target, None, prompts, turn, **ENGINE)
    assert hit.token_ids == back.token_ids == cold.token_ids == plain.token_ids
    assert rounds(hit) == rounds(back) == rounds(cold)
    assert sum(map(sum, rounds(back))) > 0


def test_preempted_requests_come_back_from_the_host(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks for one and a half of two requests, and one that is aborted in mid-round."""
    keep_async(monkeypatch)
    prompts, params = [LONG, "\n" + LONG], [greedy(60), greedy(60, **SEEDED)]
    expected = run_engine(nano_pair.target, None, prompts, params, **ENGINE)
    with open_engine(
        nano_pair.target, ddtree(nano_pair, 9), kv_transfer_config=offload.config(),
        num_gpu_blocks_override=10, max_model_len=250, **ENGINE,
    ) as llm:  # fmt: skip
        engine = llm.llm_engine
        engine.add_request("gone", PROMPTS[3], greedy(60))
        for _ in range(6):
            engine.step()
        engine.abort_request(["gone"])
        result = generate(llm, prompts, params)
        preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    worker = offload.HostWorker.latest
    assert preempted > 0 and worker is not None and worker.num_loaded > 0
    assert result.token_ids == expected.token_ids


def test_a_prefill_engine_and_a_decode_engine(
    nano_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's context comes with the target's; the checks know blocks that are brought."""
    monkeypatch.setenv("VLLM_DDTREE_CHECK", "1")
    keys = {"block_size": BLOCK, "enable_prefix_caching": False}
    prompts, params = [LONG, PROMPTS[3] * 3], [greedy(32), greedy(32, **SEEDED)]
    plain = run_engine(nano_pair.target, None, prompts, params, **keys)
    alone = run_engine(nano_pair.target, ddtree(nano_pair, 15), prompts, params, **keys, **DETAILS)
    one = [greedy(1), greedy(1, **SEEDED)]
    run_engine(
        nano_pair.target, ddtree(nano_pair, 15), prompts, one,
        kv_transfer_config=offload.over_files(tmp_path, "kv_producer"), **keys,
    )  # fmt: skip
    decoded = run_engine(
        nano_pair.target, ddtree(nano_pair, 15), prompts, params,
        kv_transfer_config=offload.over_files(tmp_path, "kv_consumer"), **keys, **DETAILS,
    )  # fmt: skip
    assert min(cached(decoded)) >= BLOCK, "nothing came from the prefill engine"
    assert decoded.token_ids == alone.token_ids == plain.token_ids
    assert rounds(decoded) == rounds(alone) and sum(map(sum, rounds(alone))) > 0
