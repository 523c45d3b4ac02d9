# SPDX-License-Identifier: Apache-2.0
"""Clients that go away in a burst leave no request and no KV block behind, and the others' text
alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, ddtree, greedy, keep_async, open_engine, run_engine

ENGINE: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 160,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 12,
}
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"presence_penalty": 0.7},
    {"bad_words": ["return"]},
]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_burst_that_goes_away(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(14)]
    params = [greedy(24, **PARAMS[i % len(PARAMS)]) for i in range(14)]
    plain = run_engine(nano_pair.target, None, prompts, params, **ENGINE).token_ids
    if asynchronous:
        keep_async(monkeypatch)
    rng = random.Random(3)
    leaves = {i: rng.randint(1, 12) for i in rng.sample(range(14), 9)}
    with open_engine(nano_pair.target, ddtree(nano_pair, 31), **ENGINE) as llm:
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(i), prompt, param)
        done: dict[str, list[int]] = {}
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
            engine.abort_request([str(i) for i, at in leaves.items() if at == steps])
        for i in set(range(14)) - set(leaves):
            assert done[str(i)] == plain[i], i
        assert not scheduler.running and not scheduler.waiting and not scheduler.requests
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
