# SPDX-License-Identifier: Apache-2.0
"""What vLLM's model runner takes from an `AdaptiveVerificationManager`."""

from typing import Any

import torch


def reallocated(
    cu_num_logits: torch.Tensor, query_start_loc: torch.Tensor, num_drafts: int
) -> tuple[Any, ...]:
    """The answer of `reallocate_drafts`: vLLM 0.33 also takes counts on their way to the host."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    answer = (cu_num_logits, query_start_loc, num_drafts)
    if hasattr(adaptive_verification, "AdmittedDraftCounts"):
        return (*answer, None)
    return answer
