# SPDX-License-Identifier: Apache-2.0
"""The oracle's rounds are those of vLLM's own chain drafting (method "dflash"), one by one.

This anchors the oracle: what a DFlash draft is, and how vLLM counts rounds and accepted tokens.
"""

from __future__ import annotations

import ddtree_testbed
from tests.oracle import Drafter, Target, Trace, greedy
from vllm_ddtree.testing.engine import run_engine

MAX_MODEL_LEN = 64
PROMPTS = (
    "import os\nimport sys\n\n\ndef main():\n",
    "class Node:\n    def __init__(self, value, parent=None):\n        self.value = value\n",
    "for x in range(10):\n",
)
MAX_TOKENS = (24, 64, 17)  # the second request ends at the length limit


def test_vllm_counts_the_same_rounds(pair) -> None:
    from vllm import SamplingParams

    ddtree_testbed.prepare()
    target = Target.load(pair.target)
    drafter = Drafter.load(pair.drafter, target)
    num_masks = drafter.block_size - 1
    result = run_engine(
        pair.target,
        {
            "method": "dflash",
            "model": str(pair.drafter),
            "num_speculative_tokens": num_masks,
        },
        PROMPTS,
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in MAX_TOKENS],
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
    )
    num_drafts = num_accepted = 0
    for request, max_tokens in zip(result.outputs, MAX_TOKENS, strict=True):
        prompt_ids = list(request.prompt_token_ids)
        sample = request.outputs[0]
        output_ids = greedy(target, prompt_ids, max_tokens + drafter.block_size)
        assert list(sample.token_ids) == output_ids[: len(sample.token_ids)]
        rounds = Trace(target, drafter, prompt_ids, output_ids).replay(
            budget=num_masks,
            top_k=1,
            chain=True,
            max_tokens=max_tokens,
            max_model_len=MAX_MODEL_LEN,
        )
        assert 1 + sum(r.emitted for r in rounds) == len(sample.token_ids)
        drafted = [r for r in rounds if r.num_nodes]
        assert [r.accepted for r in drafted] == sample.spec_decode_metrics.per_step_accepted
        assert [r.num_nodes for r in drafted] == sample.spec_decode_metrics.per_step_drafted
        num_drafts += len(drafted)
        num_accepted += sum(r.accepted for r in drafted)
    assert result.counters.num_drafts == num_drafts
    assert result.counters.num_accepted_tokens == num_accepted
