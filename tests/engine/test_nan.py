# SPDX-License-Identifier: Apache-2.0
"""Logits that are no numbers: one request's trouble stays that request's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, ddtree, generate, greedy, open_engine, run_engine

LENGTH = 8
FIRST_BAD_STEP = 3


def test_a_neighbour_of_nan_logits(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ddtree.sampler.sampler import TreeRejectionSampler

    prompts = [PROMPTS[3], PROMPTS[0], PROMPTS[0]]
    params = [greedy(LENGTH), greedy(LENGTH), greedy(LENGTH, temperature=0.7, seed=3)]
    expected = run_engine(nano_pair.target, None, prompts, params)
    call = TreeRejectionSampler.__call__
    steps = poisoned = 0

    def poison(self: Any, logits: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps, poisoned
        steps += 1
        if steps >= FIRST_BAD_STEP:
            for i, name in enumerate(input_batch.req_ids):
                if not name.startswith("2"):  # the neighbour
                    continue
                first, end = (int(x) for x in input_batch.cu_num_logits_np[i : i + 2])
                bad = logits[first : end if steps % 2 else first + 1]  # every row, or the root's
                # One number is left to each block of vLLM's kernel: the interpreter's argmax
                # stops at a block without any.
                kept = bad[:, ::1024].clone()
                bad.fill_(float("nan"))
                bad[:, ::1024] = kept
                poisoned += 1
        output = call(self, logits, input_batch, *args, **kwargs)
        assert (output.num_sampled >= 1).all() and (output.num_rejected >= 0).all()
        return output

    monkeypatch.setattr(TreeRejectionSampler, "__call__", poison)
    with open_engine(nano_pair.target, ddtree(nano_pair, 9), max_num_seqs=4) as llm:
        vocabulary = llm.llm_engine.model_config.get_vocab_size()
        result = generate(llm, prompts, params)
        monkeypatch.undo()
        after = generate(llm, prompts, params)
    assert poisoned > 0
    assert result.token_ids[:2] == expected.token_ids[:2]
    assert len(result.token_ids[2]) == LENGTH
    assert all(0 <= token < vocabulary for token in result.token_ids[2])
    counters = result.counters
    assert min(counters.per_position) >= 0
    assert sum(counters.per_position) == counters.num_accepted_tokens > 0
    # What the bad request left in the caches is nobody's afterwards.
    assert after.token_ids == expected.token_ids
