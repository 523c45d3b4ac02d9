# SPDX-License-Identifier: Apache-2.0
"""A wide batch is sampled in chunks of requests, to bound memory: same tokens, same logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, Result, ddtree, greedy, run_engine

SEEDED: dict[str, Any] = {"temperature": 0.7, "seed": 11}


def logprobs(result: Result) -> list[list[dict[int, float]]]:
    """Of every sample and token: token id -> logprob."""
    return [
        [{token: entry.logprob for token, entry in step.items()} for step in sample.logprobs or []]
        for output in result.outputs
        for sample in output.outputs
    ]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_chunks_change_nothing(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    from vllm_ddtree.sampler import sampler

    params = [greedy(8, logprobs=2), greedy(7, logprobs=0, **SEEDED), greedy(8)]
    prompts = PROMPTS[:3]
    expected = run_engine(nano_pair.target, None, prompts, params, logprobs_mode=mode)
    # Two requests of 8 rows a chunk.
    monkeypatch.setattr(sampler, "get_max_chunk_logits", lambda vocab: 16)
    got = run_engine(nano_pair.target, ddtree(nano_pair, 7), prompts, params, logprobs_mode=mode)
    assert got.token_ids == expected.token_ids
    for ours, theirs in zip(logprobs(got)[:2], logprobs(expected)[:2], strict=True):
        assert [set(step) for step in ours] == [set(step) for step in theirs]
        for step, reference in zip(ours, theirs, strict=True):
            assert step == pytest.approx(reference, abs=1e-3)
