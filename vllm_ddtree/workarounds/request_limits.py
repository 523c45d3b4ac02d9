# SPDX-License-Identifier: Apache-2.0
"""Requests that are larger than vLLM's worker has room for are refused before they reach it.

vLLM, v1/worker/gpu/sample/bad_words.py and logit_bias.py: the worker raises when a request has too
many bad words, allowed tokens or stop tokens. That stops the engine, and with it all other
requests.

It can go when vLLM checks these limits in its front-end (v1/engine/input_processor.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ddtree import integration

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def check(params: SamplingParams) -> None:
    """Refuse parameters that would stop the engine.

    Args:
        params: complete, with bad words as tokens and the model's own stop tokens.

    Raises:
        VLLMValidationError: a limit is exceeded; a server answers with status 400.

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
