# SPDX-License-Identifier: Apache-2.0
"""Requests that verify a chain instead of a tree.

vLLM's penalties, bad words, thinking budget, grammars and custom logits processors take the
preceding rows of a request as tokens already generated. On a tree these rows include siblings, so
such a request gets the tree's spine alone: a chain of up to the draft depth inside the same rows,
for which vLLM's own processing is right as it stands.
"""

from typing import Any


def needs_chain(sampling_params: Any) -> bool:
    """Whether the parameters depend on the tokens before a row."""
    if sampling_params is None:
        return False
    p = sampling_params
    return bool(
        p.presence_penalty
        or p.frequency_penalty
        or p.repetition_penalty != 1.0
        or p.bad_words
        or p.structured_outputs is not None
        or getattr(p, "thinking_token_budget", None) is not None
        or getattr(p, "repetition_detection", None) is not None
    )


def has_custom_processors(sampler: Any) -> bool:
    """Whether a sampler runs logits processors of the user's: given to the engine, or installed as
    entry points (vLLM's v1/worker/gpu/sample/logits_processor/loader.py)."""
    from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
    from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

    own = (LogitBiasState, PenaltiesState, BadWordsState)
    return any(not isinstance(processor, own) for processor in sampler.logits_processors)
