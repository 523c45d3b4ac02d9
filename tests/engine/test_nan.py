# SPDX-License-Identifier: Apache-2.0
"""A request whose logits are no numbers is in trouble alone: its neighbours' text does not
change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, ddtree, generate, greedy, open_engine, run_engine

LENGTH = 8
FIRST_BAD_STEP = 3


def nans_by_row(logits: torch.Tensor) -> torch.Tensor:
    return logits.isnan().sum(-1, dtype=torch.int32)


def test_a_neighbour_of_nan_logits(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.sample import sampler as vllm_sampler

    from vllm_ddtree.sampler import sampler
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
                kept = bad[:, ::1024].clone()
                bad.fill_(float("nan"))
                if steps % 3:  # else nothing but NaN
                    bad[:, ::1024] = kept
                poisoned += 1
        output = call(self, logits, input_batch, *args, **kwargs)
        assert output.num_nans.shape == (len(input_batch.req_ids),)
        counted = [n for n, nans in zip(input_batch.req_ids, output.num_nans, strict=True) if nans]
        assert [name[0] for name in counted] == ["2"] * (steps >= FIRST_BAD_STEP)
        assert (output.num_sampled >= 1).all() and (output.num_rejected >= 0).all()
        return output

    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    for module in (vllm_sampler, sampler):  # the interpreter has no libdevice
        monkeypatch.setattr(module, "get_num_nans", nans_by_row)
    with open_engine(nano_pair.target, ddtree(nano_pair, 9), max_num_seqs=4) as llm:
        vocabulary = llm.llm_engine.model_config.get_vocab_size()
        with monkeypatch.context() as patch:
            patch.setattr(TreeRejectionSampler, "__call__", poison)
            result = generate(llm, prompts, params)
        corrupted = sum(m.value for m in llm.get_metrics() if "corrupted_requests" in m.name)
        after = generate(llm, prompts, params)
    assert poisoned > 2 and corrupted == 1
    assert result.token_ids[:2] == expected.token_ids[:2]
    assert len(result.token_ids[2]) == LENGTH
    assert all(0 <= token < vocabulary for token in result.token_ids[2])
    counters = result.counters
    assert min(counters.per_position) >= 0
    assert sum(counters.per_position) == counters.num_accepted_tokens > 0
    # What the bad request left in the caches is nobody's afterwards.
    assert after.token_ids == expected.token_ids
