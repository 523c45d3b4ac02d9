# SPDX-License-Identifier: Apache-2.0
"""Every key of the speculative config with every kind of value, alone and together: it builds with
what was given, or one line says which key, which value and what to do.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.config.building import build, refusal
from tests.conftest import NANO
from vllm_ddtree.config.keys import DFLASH_KEYS, FIXED_KEYS, OWN_KEYS

VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2.5, 7, 8, 32, 65, 255, 256, 10**30, float("nan"), -0.0),
    *("", "abc", "5", "auto", "5 ", "greedy", "standard", "two\nlines", b"x"),
    *([], [7], (1, 2), {}, {"a": 1}, {"load_format": "dummy"}, object()),
    *([[1, 4, 7]], ((1, 2, 3), (5, 9, 0)), [[1, 4, "7"]], [[1, 4, 256]], [[1, 4, 0]], [[2, 4, 7]]),
    *([[1, 4, 7], [4, 9, 3]], [[1, 4, True]], [[1, 4]], [[4, 1, 7]], [[1, 4, 7, 9]]),
]


def whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def either(*values: Any) -> Callable[[Any], bool]:
    """The values themselves or equal numbers: vLLM takes 0 and 1 for booleans, "5" for a number."""
    return lambda v: any(v is x or (isinstance(v, (int, float, str)) and v == x) for x in values)


def text(value: Any) -> bool:
    return isinstance(value, (str, bytes))


# What a key takes, None (as if absent) left out. The pair's block size is 8, its length 256.
RIGHT: dict[str, Callable[[Any], bool]] = {
    "budget": lambda v: whole(1, 255)(v) or either("auto")(v),
    "budget_per_batch_size": either(VALUES[32], VALUES[33]),
    "mean_budget": either(),  # alone; `right_beside` knows more
    "top_k": whole(1, 64),
    "num_speculative_tokens": whole(1, 7),
    "conditional": lambda v: isinstance(v, bool),
    "model": either(),
    "draft_tensor_parallel_size": either(1),
    "quantization": either(),
    "moe_backend": either("auto"),
    "attention_backend": either("auto"),
    "kv_cache_dtype": either("auto"),
    "max_model_len": lambda v: whole(1, 256)(v) or either(True, "5", "5 ")(v),
    "revision": text,
    "code_revision": text,
    "draft_load_config": lambda v: v == {} or v == {"load_format": "dummy"},
    "enforce_eager": either(0, 1),
    "disable_eagle_block_drop": either(0, 1),
    "disable_lookahead_block_hashes": either(0, 1),
    "draft_sample_method": either("greedy"),
    "rejection_sample_method": either("standard"),
    "use_local_argmax_reduction": either(0),
    "enable_adaptive_verification": either(0),
    "disable_padded_drafter_batch": either(0),
    "parallel_drafting": either(1),
    # Keys of other methods, or of none.
    "num_speculative_tokens_per_batch_size": either(),
    "tensor_parallel_size": either(),
    "ngram_size": either(),
}
NEVER_NONE = {
    "model",
    "disable_eagle_block_drop",
    "disable_lookahead_block_hashes",
    "num_speculative_tokens_per_batch_size",
    "tensor_parallel_size",
    "ngram_size",
}


def is_right(key: str, value: Any) -> bool:
    from vllm.config.speculative import SpeculativeConfig

    if key in DFLASH_KEYS and not hasattr(SpeculativeConfig, key):  # a key of vLLM 0.33
        return key in ("method", "model")
    return key not in NEVER_NONE if value is None else RIGHT[key](value)


def right_beside(key: str, value: Any, keys: dict[str, Any]) -> bool:
    """Whether a value is right beside other keys."""
    budget = keys.get("budget")
    if key == "mean_budget" and value is not None and budget is not None and whole(2, 255)(budget):
        return whole(1, budget - 1)(value)
    return is_right(key, value)


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """vLLM says much about every configuration."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def made(keys: dict[str, Any]) -> Any:
    return build(keys, max_num_batched_tokens=4096).speculative_config


def test_no_key_is_left_out() -> None:
    assert set(RIGHT) >= {*OWN_KEYS, *DFLASH_KEYS, *FIXED_KEYS} - {"method"}


@pytest.mark.parametrize("key", RIGHT)
def test_every_value(key: str) -> None:
    for value in VALUES:
        if is_right(key, value):
            made({key: value})
        else:
            message = refusal(functools.partial(made, {key: value}))
            assert f"{key}={value!r} is not valid for method ddtree: " in message
            assert message.startswith("speculative_config: ")


def conflict(keys: dict[str, Any]) -> str | None:
    """The key that is right alone and wrong beside another: a budget beside a schedule."""
    both = keys.get("budget") is not None and keys.get("budget_per_batch_size") is not None
    return "budget" if both else None


@pytest.mark.parametrize("seed", range(4))
def test_keys_together(seed: int) -> None:
    """Two to six keys, most of them right: a wrong one is named, whatever stands beside it."""
    draw = random.Random(seed)
    built = refused = 0
    for _ in range(60):
        keys: dict[str, Any] = {}
        for key in draw.sample(list(RIGHT), draw.randint(2, 6)):
            right = draw.random() < 0.85
            if values := [v for v in VALUES if is_right(key, v) == right]:
                keys[key] = draw.choice(values)
        wrong = [key for key, value in keys.items() if not right_beside(key, value, keys)]
        if both := conflict(keys):
            wrong.append(both)
        if wrong:
            message = refusal(functools.partial(made, keys))
            assert any(f"{key}={keys[key]!r} is not valid" in message for key in wrong), keys
            refused += 1
            continue
        spec = made(keys)
        budget, schedule = keys.get("budget"), keys.get("budget_per_batch_size")
        auto = budget == "auto" or (budget is None and schedule is None)
        expected = 63 if auto else max(nodes for _, _, nodes in schedule) if schedule else budget
        assert spec.budget == spec.num_speculative_tokens == expected
        assert spec.top_k == min(keys.get("top_k") or 16, expected)
        assert spec.depth_limit == (keys.get("num_speculative_tokens") or 7)
        assert spec.auto_budget == auto
        assert spec.mean_budget == keys.get("mean_budget")
        built += 1
    assert built > 10 and refused > 10


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({5: 1}, ["5=1", "name"]),
        ({None: 1}, ["None=1", "name"]),
        ({"": 1}, ["''=1", "no such key"]),
        ({"two\nlines": 1}, [r"'two\nlines'=1", "no such key"]),
        ({"budget ": 3}, ["'budget '=3", "did you mean 'budget'"]),
        ({"Budget": 3}, ["Budget=3", "did you mean 'budget'"]),
        ({"top-k": 3, "top_k": 5}, ["top_k=5", "given twice", "3"]),
    ],
    ids=str,
)
def test_odd_names(keys: dict[Any, Any], parts: list[str]) -> None:
    message = refusal(lambda: build(keys))
    for part in ("speculative_config: ", "ddtree", *parts):
        assert part in message


@pytest.mark.parametrize("given", ["ddtree", [1], [["budget", 3]], 5])
def test_no_object_at_all(given: Any) -> None:
    from vllm.engine.arg_utils import EngineArgs

    keys: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "spec_method": "ddtree"}
    args = EngineArgs(model=str(NANO.target), speculative_config=given, **keys)
    message = refusal(args.create_engine_config)
    assert f"--speculative-config={given!r}" in message and "JSON object" in message
