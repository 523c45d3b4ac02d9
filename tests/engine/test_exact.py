# SPDX-License-Identifier: Apache-2.0
"""Output is the target's own, token for token, at budgets on both sides of the block size.

vLLM's noise is keyed by seed and position, so a seeded request too must give the very tokens that
it gives without speculation (sample-and-follow; DDTree, arXiv 2604.12989).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, Result, ddtree, greedy, run_engine

if TYPE_CHECKING:
    from vllm import SamplingParams

ONE_TOKEN, SEVERAL_BLOCKS = PROMPTS[1], PROMPTS[5]
# (prompt, parameters) of one batch: prompts of different lengths, parameters of every kind.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (SEVERAL_BLOCKS, {}),
    (ONE_TOKEN, {"temperature": 1.0, "seed": 1}),
    (PROMPTS[2], {"temperature": 0.6, "seed": 2, "top_p": 0.9, "top_k": 20}),
    (PROMPTS[3], {"temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 20}),
    (PROMPTS[4], {"temperature": 0.6, "seed": 4}),
    (PROMPTS[0], {}),
]
MAX_TOKENS = 20
# Blocks that trees cross, and room for every node of every request in a step.
ENGINE: dict[str, Any] = {"block_size": 32, "max_num_batched_tokens": 1024}


def batch() -> tuple[list[str], list[SamplingParams]]:
    """Every request with another length, so that the batch shrinks as it goes."""
    params = [greedy(MAX_TOKENS - i, **more) for i, (_, more) in enumerate(REQUESTS)]
    return [prompt for prompt, _ in REQUESTS], params


@functools.cache
def plain(pair: Pair) -> Result:
    return run_engine(pair.target, None, *batch(), **ENGINE)


@pytest.mark.parametrize("budget", [1, 5, 7, 8, 15, 16, 31, 63])
def test_same_tokens_as_without_speculation(pair: Pair, budget: int) -> None:
    expected = plain(pair)
    result = run_engine(pair.target, ddtree(pair, budget), *batch(), **ENGINE)
    assert result.token_ids == expected.token_ids
    assert result.texts == expected.texts
    counters = result.counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert counters.num_draft_tokens == budget * counters.num_drafts
