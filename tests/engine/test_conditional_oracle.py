# SPDX-License-Identifier: Apache-2.0
"""The oracle's rounds of a DSpark chain are those of vLLM's own method "dspark", one by one.

This anchors the oracle: where the anchor drafts, what the Markov head adds. (vLLM's walk of DFlash2
and LiLiCorr needs a GPU: tests/gpu/test_engine_conditional.py.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import conditional
from tests.engine.harness import PROMPTS, greedy, run_engine
from tests.oracle import Target
from tests.oracle import greedy as continuation
from tests.oracle.conditional import DSpark, LatticeTrace

MAX_MODEL_LEN = 136
MAX_TOKENS = (22, 99)  # the second request ends at the length limit
CANDIDATES = 128
"""vLLM takes the best of the whole vocabulary; it is among so many."""


@pytest.mark.parametrize("from_anchor", [False, True])
def test_vllm_counts_the_same_rounds(from_anchor: bool, tmp_path: Path) -> None:
    pair = conditional.dspark(tmp_path, from_anchor=from_anchor)
    depth = pair.block_size - (not from_anchor)
    chain: dict[str, Any] = {
        "method": "dspark",
        "model": str(pair.drafter),
        "num_speculative_tokens": depth,
    }
    result = run_engine(
        pair.target,
        chain,
        [PROMPTS[0], PROMPTS[5]],
        [greedy(n) for n in MAX_TOKENS],
        block_size=32,
        max_model_len=MAX_MODEL_LEN,
        per_request_spec_decode_metrics="detailed",
    )
    target = Target.load(pair.target)
    drafter = DSpark.load(pair.drafter, target)
    drafter.top_k = CANDIDATES
    num_accepted = 0
    for request, max_tokens in zip(result.outputs, MAX_TOKENS, strict=True):
        prompt = list(request.prompt_token_ids)
        known = continuation(target, prompt, min(max_tokens, 40) + pair.block_size)
        sample = request.outputs[0]
        assert list(sample.token_ids) == known[: len(sample.token_ids)]
        rounds = LatticeTrace(target, drafter, prompt, known).replay(
            budget=depth,
            top_k=CANDIDATES,
            chain=True,
            max_tokens=min(max_tokens, MAX_MODEL_LEN - len(prompt)),
            max_model_len=MAX_MODEL_LEN,
        )
        drafted = [r for r in rounds if r.num_nodes]
        metrics = sample.spec_decode_metrics
        assert metrics.per_step_accepted == [r.accepted for r in drafted]
        assert metrics.per_step_drafted == [r.num_nodes for r in drafted]
        num_accepted += sum(metrics.per_step_accepted)
    assert num_accepted > 3
