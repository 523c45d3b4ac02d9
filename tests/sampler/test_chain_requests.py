# SPDX-License-Identifier: Apache-2.0
"""Requests whose sampling depends on earlier tokens verify a chain, all others a tree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_ddtree.sampler.chain_requests import has_custom_processors, needs_chain


@pytest.mark.parametrize(
    ("params", "chain"),
    [
        ({}, False),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 1}, False),
        ({"min_tokens": 3, "allowed_token_ids": [1, 2], "stop": ["x"], "logprobs": 3}, False),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"bad_words": ["x"]}, True),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, True),
        ({"thinking_token_budget": 4}, True),
    ],
)
def test_needs_chain(params: dict[str, Any], chain: bool) -> None:
    assert needs_chain(SamplingParams(**params)) is chain


def test_no_parameters_no_chain() -> None:
    assert needs_chain(None) is False  # a pooling request


def test_custom_processors() -> None:
    """vLLM's own three know where they are; others take the rows before theirs as tokens."""
    from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
    from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

    own = [object.__new__(cls) for cls in (LogitBiasState, PenaltiesState, BadWordsState)]
    assert not has_custom_processors(SimpleNamespace(logits_processors=own))
    assert has_custom_processors(SimpleNamespace(logits_processors=[*own, object()]))


def test_vllm_still_has_just_these_processors(device: str) -> None:
    """A fourth one of vLLM's own would turn every request into a chain, silently."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    states = RequestState(2, 64, 64, 3, 16, device)
    sampler = Sampler(SimpleNamespace(reasoning_config=None), 2, 16, device, states)
    assert not has_custom_processors(sampler)
