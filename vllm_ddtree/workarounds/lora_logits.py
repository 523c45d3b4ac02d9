# SPDX-License-Identifier: Apache-2.0
"""The adapter of every row that is sampled, not of every request.

vLLM, v1/worker/gpu/lora_utils.py, `LoraState.make_lora_inputs`: Model Runner V2 names one adapter a
request for the rows of the logits. A verify step has several such rows a request, so row 1 of the
first request gets the adapter of the second one. On a GPU an adapter with an `lm_head` then gives
other logits to the wrong rows. On a CPU the engine stops. (The V1 runner repeats them since
vllm-project/vllm#21068.)

It can go when `make_lora_inputs` knows how many rows of each request are sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def by_row(by_request: Sequence[int], num_logits: np.ndarray) -> tuple[int, ...]:
    """Adapters by row of the logits.

    Args:
        by_request: the adapter of each request, 0 for none.
        num_logits: int [num_reqs], rows of each request.

    """
    return tuple(np.repeat(np.asarray(by_request), num_logits).tolist())
