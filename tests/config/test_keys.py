# SPDX-License-Identifier: Apache-2.0
"""The keys of `method: ddtree`: what they become, and what is refused in one line of key, value
and fix.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.building import DRAFTER, TARGET, build, refusal


def test_defaults() -> None:
    spec = build().speculative_config
    assert spec.auto_budget
    assert (spec.budget, spec.top_k, spec.depth_limit, spec.block_size) == (63, 16, 7, 8)
    # Toward vLLM: a DFlash draft of as many tokens as there are nodes.
    assert spec.method == "dflash" and spec.num_speculative_tokens == 63
    assert repr(spec) == (
        f"SpeculativeConfig(method='ddtree', model={str(DRAFTER)!r}, family=DFlash, budget=auto, "
        "depth=7, top_k=16, block_size=8)"
    )
    assert "budget=31, depth" in repr(build({"budget": 31}).speculative_config)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"budget": 1}, (1, 1, 7)),
        ({"budget": 255, "top_k": 64}, (255, 64, 7)),
        ({"budget": 5}, (5, 5, 7)),  # a node of rank 5 has five better siblings
        ({"budget": 40, "top_k": 3, "num_speculative_tokens": 2}, (40, 3, 2)),
        ({"num-speculative-tokens": 4, "top-k": 9}, (63, 9, 4)),
        ({"budget": None, "top_k": None, "num_speculative_tokens": None}, (63, 16, 7)),
    ],
    ids=str,
)
def test_values(keys: dict[str, Any], expected: tuple[int, int, int]) -> None:
    spec = build(keys, max_num_batched_tokens=4096).speculative_config
    assert (spec.budget, spec.top_k, spec.depth_limit) == expected


@pytest.mark.parametrize("budget", [1, 5, 7, 8, 31])
def test_lookahead_covers_tree_and_draft_block(budget: int) -> None:
    config = build({"budget": budget})
    assert config.num_lookahead_tokens == max(budget + 1, 8)
    assert config.speculative_config.max_depth == min(budget, 7)


def test_dflash_keys_keep_their_meaning() -> None:
    spec = build(
        {
            "draft_tensor_parallel_size": 1,
            "attention_backend": "CPU_ATTN",
            "max_model_len": 128,
            "enforce_eager": True,
            "draft_sample_method": "greedy",
            "rejection_sample_method": "standard",
            "parallel_drafting": True,
        }
    ).speculative_config
    assert spec.draft_tensor_parallel_size == 1
    assert spec.draft_model_config.max_model_len == 128
    assert spec.enforce_eager is True
    assert "CPU_ATTN" in str(spec.attention_backend)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"budget": 0}, ["budget=0", "1 to 255"]),
        ({"budget": 256}, ["budget=256", "1 to 255"]),
        ({"budget": -3}, ["budget=-3", "1 to 255"]),
        ({"budget": "31"}, ["budget='31'", "whole number"]),
        ({"budget": 7.5}, ["budget=7.5", "whole number"]),
        ({"budget": True}, ["budget=True", "whole number"]),
        ({"budget": [7]}, ["budget=[7]", "whole number"]),
        ({"top_k": 0}, ["top_k=0", "1 to 64"]),
        ({"top_k": 65}, ["top_k=65", "1 to 64"]),
        ({"top_k": "a"}, ["top_k='a'", "whole number"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens=0", "from 1 to 7"]),
        ({"num_speculative_tokens": 8}, ["num_speculative_tokens=8", "from 1 to 7", "budget"]),
        ({"num_speculative_tokens": 99}, ["num_speculative_tokens=99", "from 1 to 7"]),
        ({"num_speculative_tokens": "3"}, ["num_speculative_tokens='3'", "whole number"]),
        ({"budgets": 7}, ["budgets=7", "no such key", "'budget'"]),
        ({"topk": 7}, ["topk=7", "no such key", "'top_k'"]),
        ({"zebra": 1}, ["zebra=1", "no such key", "budget", "top_k"]),
        ({"prompt_lookup_max": 4}, ["prompt_lookup_max=4", "no such key"]),
        ({"tensor_parallel_size": 1}, ["tensor_parallel_size=1", "draft_tensor_parallel_size"]),
        (
            {"draft_sample_method": "probabilistic"},
            ["draft_sample_method='probabilistic'", "'greedy'"],
        ),
        (
            {"rejection_sample_method": "block"},
            ["rejection_sample_method='block'", "'standard'"],
        ),
        ({"parallel_drafting": False}, ["parallel_drafting=False", "True"]),
        ({"disable_padded_drafter_batch": True}, ["disable_padded_drafter_batch=True", "False"]),
        ({"use_local_argmax_reduction": True}, ["use_local_argmax_reduction=True", "False"]),
        ({"enable_adaptive_verification": True}, ["enable_adaptive_verification=True", "False"]),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 4, 7]]},
            ["num_speculative_tokens_per_batch_size", "budget_per_batch_size"],
        ),
        *(
            ({"budget_per_batch_size": value}, ["budget_per_batch_size", part, "give ranges"])
            for value, part in [
                ([[1, 4, 7], [5, 8, "7"]], "[5, 8, '7'] is not three whole numbers"),
                ([[1, 4]], "[1, 4] is not three whole numbers"),
                ([1, 4, 7], "1 is not three whole numbers"),
                ([[2, 4, 7]], "[2, 4, 7] begins at 2, not at 1"),
                ([[1, 4, 7], [4, 8, 3]], "[4, 8, 3] begins before the range before it ends"),
                ([[1, 4, 7], [8, 5, 3]], "[8, 5, 3] ends before it begins"),
                ([[1, 4, 256]], "[1, 4, 256] has a budget that is not from 0 to 255"),
            ]
        ),
        ({"model": None}, ["model=None", "drafter"]),
        ({"model": ""}, ["model=''", "drafter"]),
        ({"model": 7}, ["model=7", "drafter"]),
        ({"model": "/no/such/drafter"}, ["model='/no/such/drafter'", "DFlash drafter"]),
        ({"quantization": 7}, ["quantization=7"]),
        ({"max_model_len": "long"}, ["max_model_len='long'"]),
        ({"attention_backend": 3}, ["attention_backend=3", "FLASH_ATTN"]),
        ({"attention_backend": "NOPE"}, ["attention_backend='NOPE'", "FLASH_ATTN"]),
        ({"draft_load_config": {"nope": 1}}, ["draft_load_config={'nope': 1}", "leave that out"]),
        ({"model": str(TARGET)}, [f"model={str(TARGET)!r}", "DFlash drafter", "no draft model"]),
    ],
    ids=lambda v: str(v).replace(str(TARGET), "TARGET") if isinstance(v, dict) else "",
)
def test_wrong_keys(keys: dict[str, Any], parts: list[str]) -> None:
    message = refusal(lambda: build(keys))
    for part in ("ddtree", *parts):
        assert part in message


def test_a_key_of_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ddtree.config import keys

    monkeypatch.setattr(keys, "DFLASH_KEYS", (*keys.DFLASH_KEYS, "key_of_tomorrow"))
    message = refusal(lambda: build({"key_of_tomorrow": 1}))
    assert "key_of_tomorrow=1" in message and "leave it out" in message
    assert "key_of_tomorrow" not in refusal(lambda: build({"zebra": 1}))


def test_no_drafter_at_all() -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(TARGET), speculative_config={"method": "ddtree"})
    message = refusal(args.create_engine_config)
    assert "model=None" in message and "drafter" in message
