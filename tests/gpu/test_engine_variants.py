# SPDX-License-Identifier: Apache-2.0
"""Targets with windows, soft-caps, sinks and experts give their own texts, with whole verify steps
in CUDA graphs, on both attention backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine import models
from tests.gpu.engines import (
    ENGINE,
    GRAPHS,
    UNTRAINED,
    Served,
    check_gaps,
    gaps,
    qwen3_moe,
    requests,
    serve,
    spec,
)
from vllm_ddtree.testing.engine import run_engine

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
LAYERS = 8  # of the small target


def mixed(folder: Path, pair: Pair) -> Pair:
    """Windowed layers (one window shorter than a branch) and full ones: several KV groups."""
    windows = [24, None, 5, None] * (LAYERS // 4)
    return models.varied_pair(folder, windows, [None] * LAYERS, [None] * LAYERS, pair)


def soft_capped(folder: Path, pair: Pair) -> Pair:
    """As Gemma 2: soft-caps everywhere, windows in every other layer."""
    return models.varied_pair(
        folder, [24, None] * (LAYERS // 2), [8.0] * LAYERS, [None] * LAYERS, pair
    )


def with_sinks(folder: Path, pair: Pair) -> Pair:
    """As gpt-oss: sinks everywhere, windows in every other layer."""
    sinks: list[list[float] | None] = [[0.5, 3.0, -1.0, 1.0]] * LAYERS
    return models.varied_pair(folder, [24, None] * (LAYERS // 2), [None] * LAYERS, sinks, pair)


@pytest.mark.parametrize(
    ("kind", "budget"),
    [(mixed, 31), (soft_capped, 15), (with_sinks, 31)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_attention(
    kind: Callable[[Path, Pair], Pair], budget: int, tmp_path: Path, small_pair: Pair
) -> None:
    pair = kind(tmp_path, small_pair)
    texts = []
    for backend in BACKENDS:
        run = serve(pair, spec(pair, budget), attention_backend=backend, **GRAPHS)
        print(kind.__name__, backend, run.result.counters.acceptance_length, dict(run.replays))
        assert run.result.counters.num_accepted_tokens > 0, backend
        assert run.replays, backend
        assert run.compiled == [], backend
        texts += run.judged
    check_gaps(gaps(pair, texts), **UNTRAINED)


def test_requests_that_share(small_pair: Pair) -> None:
    """On the device's own lengths of requests, roots alone among them."""
    texts = []
    for backend in BACKENDS:
        keys = {**spec(small_pair, 31), "mean_budget": 3}
        engine = {**ENGINE, "attention_backend": backend, "enforce_eager": True}
        result = run_engine(small_pair.target, keys, *requests(), **engine)
        print(backend, result.counters.acceptance_length)
        assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens
        texts += Served(result).judged
    check_gaps(gaps(small_pair, texts))


def test_experts(tmp_path: Path) -> None:
    from vllm import SamplingParams

    pair = qwen3_moe(tmp_path)
    engine: dict[str, Any] = {**ENGINE, "skip_tokenizer_init": True}
    lens = (300, 3, 33, 16, 1, 120, 64, 7)
    prompts = [[(7 * i * i + i * n) % models.VOCABULARY for i in range(n)] for n in lens]
    params = [
        SamplingParams(temperature=0, max_tokens=8 * i, ignore_eos=True, detokenize=False)
        for i in range(1, len(lens) + 1)
    ]
    result = run_engine(pair.target, spec(pair, 15), prompts, params, **{**engine, **GRAPHS})
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens
    texts = list(zip(prompts, result.token_ids, strict=True))
    check_gaps(gaps(pair, texts, skip_tokenizer_init=True), **UNTRAINED)
