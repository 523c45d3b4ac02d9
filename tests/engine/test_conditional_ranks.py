# SPDX-License-Identifier: Apache-2.0
"""Conditional drafters over two ranks: the same trees on both, the rounds of one rank.

Every rank finds the candidates of its half of the vocabulary and scores those of all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import conditional
from tests.conftest import NANO, Pair
from tests.engine.harness import PROMPTS, ddtree, generate, greedy, open_engine, run_engine
from tests.engine.ranks import check_heads, record, rounds

ENGINE: dict[str, Any] = {
    "block_size": 32,
    "max_num_seqs": 4,
    "max_model_len": 112,
    "kv_cache_memory_bytes": 4 << 20,
}


def head_name(worker: Any) -> str:
    return type(worker.model_runner.speculator.head).__name__


def reduced(folder: Path) -> Pair:
    return conditional.dspark(folder, vocabulary=2000)


@pytest.mark.parametrize(
    "make",
    [conditional.dflash2, conditional.lilicorr, conditional.dspark, reduced],
    ids=lambda f: f.__name__,
)
def test_same_tokens_and_rounds_as_one_rank(make: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make(tmp_path)
    spec = ddtree(pair, 15, top_k=4)
    prompts = [PROMPTS[0], PROMPTS[5], PROMPTS[2]]
    params = [greedy(12), greedy(6, presence_penalty=0.5), greedy(9, temperature=0.6, seed=2)]
    plain = run_engine(NANO.target, None, prompts, params, **ENGINE)
    one = run_engine(NANO.target, spec, prompts, params, **ENGINE)
    with open_engine(NANO.target, spec, tensor_parallel_size=2, **ENGINE) as llm:
        llm.collective_rpc(record)
        result = generate(llm, prompts, params)
        assert rounds(llm) > 5
        if make in (conditional.dspark, reduced):
            assert llm.collective_rpc(head_name) == ["ShardedHead"] * 2
        else:
            check_heads(llm)
    assert result.token_ids == one.token_ids == plain.token_ids
    assert result.counters == one.counters
    assert result.counters.num_accepted_tokens > 0
