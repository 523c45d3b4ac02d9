# SPDX-License-Identifier: Apache-2.0
"""What vLLM's worker has room for, by request."""

from typing import NamedTuple


class RequestLimits(NamedTuple):
    """What vLLM's worker has room for, by request. It raises beyond, which stops the engine
    (v1/worker/gpu/sample/bad_words.py, logit_bias.py)."""

    bad_word_tokens: int
    allowed_token_ids: int
    stop_token_ids: int
    """Where min_tokens keeps them back."""


def request_limits() -> RequestLimits:
    """Those of this process's environment."""
    from vllm import envs
    from vllm.v1.worker.gpu.sample import logit_bias

    return RequestLimits(
        envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
        logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        logit_bias.MAX_NUM_STOP_TOKEN_IDS,
    )
