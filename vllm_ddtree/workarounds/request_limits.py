# SPDX-License-Identifier: Apache-2.0
"""Refuses a request that is more than vLLM's worker has room for, before it reaches the worker."""

from typing import Any

from vllm_ddtree import integration


def check(params: Any) -> None:
    """Raises VLLMValidationError, a 400 of a server, for SamplingParams that would stop the engine.

    They must be complete: bad words as tokens, the model's own stop tokens among the others.
    """
    from vllm.exceptions import VLLMValidationError

    limits = integration.request_limits()
    words = params.bad_words_token_ids or []
    stops = params.all_stop_token_ids if params.min_tokens else ()
    for key, what, count, limit in (
        ("bad_words", "tokens", sum(map(len, words)), limits.bad_word_tokens),
        ("allowed_token_ids", "ids", len(params.allowed_token_ids or ()), limits.allowed_token_ids),
        ("stop_token_ids", "ids (with min_tokens)", len(stops), limits.stop_token_ids),
    ):
        if count > limit:
            raise VLLMValidationError(
                f"{key} has {count} {what}: give at most {limit}", parameter=key, value=count
            )
