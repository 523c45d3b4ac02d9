# SPDX-License-Identifier: Apache-2.0
"""How vLLM's rejection sampler cuts a batch."""

from typing import Any


def request_chunks(cu_num_logits: Any, max_logits: int) -> list[tuple[int, int]]:
    """Ranges of requests with at most `max_logits` rows each, no request split.

    Args:
        cu_num_logits: NumPy int32 [num_reqs + 1].
        max_logits: rows.

    """
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import _iter_request_chunks

    return list(_iter_request_chunks(cu_num_logits, max_logits))
