# SPDX-License-Identifier: Apache-2.0
"""On two GPUs the ranks hold the same trees and the texts are the target's own, with tensor
parallelism and with experts spread over them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

# vLLM starts its workers anew in a process that has used CUDA.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

from tests.conftest import Pair
from tests.engine import models
from tests.engine.harness import PROMPTS
from tests.engine.ranks import check_heads, record, rounds
from tests.gpu.engines import (
    ENGINE,
    GRAPHS,
    UNTRAINED,
    Served,
    check_gaps,
    gaps,
    qwen3_moe,
    requests,
    spec,
)
from vllm_ddtree.testing.engine import generate, open_engine

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
TWO: dict[str, Any] = {**ENGINE, "tensor_parallel_size": 2}


@pytest.mark.parametrize(("budget", "graphs"), [(31, {}), ("auto", GRAPHS)], ids=["31", "auto"])
def test_tensor_parallel(budget: int | str, graphs: dict[str, Any], small_pair: Pair) -> None:
    """The mix, and a request that runs into the length limit in mid-tree."""
    from vllm import SamplingParams

    prompts, params = requests()
    with open_engine(small_pair.target, spec(small_pair, budget), **TWO, **graphs) as llm:
        llm.collective_rpc(record)
        result = generate(llm, prompts, params)
        assert rounds(llm) > 20
        tokens = llm.get_tokenizer().encode(PROMPTS[5] * 30)[: ENGINE["max_model_len"] - 30]
        limit = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        last = generate(llm, [tokens], limit)
        assert rounds(llm) > 0
        check_heads(llm)
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens
    assert [len(text) for text in result.token_ids] == [p.max_tokens for p in params]
    assert len(tokens) + len(last.token_ids[0]) == ENGINE["max_model_len"]
    check_gaps(gaps(small_pair, [*Served(result).judged, (tokens, last.token_ids[0])]))


def test_expert_parallel(tmp_path: Path) -> None:
    from vllm import SamplingParams

    pair = qwen3_moe(tmp_path)
    lens = (200, 3, 33, 16, 1, 70)
    prompts = [[(7 * i * i + i * n) % models.VOCABULARY for i in range(n)] for n in lens]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    engine = {**TWO, **GRAPHS, "enable_expert_parallel": True, "skip_tokenizer_init": True}
    with open_engine(pair.target, spec(pair, 15), **engine) as llm:
        assert llm.llm_engine.vllm_config.parallel_config.enable_expert_parallel
        llm.collective_rpc(record)
        result = generate(llm, prompts, params)
        assert rounds(llm) > 10
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens
    texts = list(zip(prompts, result.token_ids, strict=True))
    check_gaps(gaps(pair, texts, skip_tokenizer_init=True), **UNTRAINED)
