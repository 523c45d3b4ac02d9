# SPDX-License-Identifier: Apache-2.0
"""Where the front-end makes an engine's request of a client's."""

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_ddtree.integration.replace import replace


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


def hook_requests(is_ddtree: Callable[[Any], bool], check: Callable[[Any], None]) -> None:
    """Let a request's parameters be checked when they are complete.

    Args:
        is_ddtree: whether a speculative config is DDTree's.
        check: (SamplingParams) -> None; what it raises is the client's answer.

    """
    from vllm.v1.engine.input_processor import InputProcessor

    def process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
        def process(self: Any, *args: Any, **kwargs: Any) -> Any:
            request = original(self, *args, **kwargs)
            if is_ddtree(self.speculative_config) and request.sampling_params is not None:
                check(request.sampling_params)
            return request

        return process

    replace(InputProcessor, "process_inputs", process_inputs)
