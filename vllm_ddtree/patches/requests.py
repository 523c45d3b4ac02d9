# SPDX-License-Identifier: Apache-2.0
"""Where the front-end makes an engine's request of a client's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ddtree.presence import is_ddtree

if TYPE_CHECKING:
    from vllm.v1.engine.input_processor import InputProcessor


def process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """`InputProcessor.process_inputs`, whose request has its parameters complete."""

    def process(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        if is_ddtree(self.speculative_config) and request.sampling_params is not None:
            from vllm_ddtree.workarounds import request_limits

            request_limits.check(request.sampling_params)
        return request

    return process
