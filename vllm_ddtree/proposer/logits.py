# SPDX-License-Identifier: Apache-2.0
"""The logits from which a drafter's candidates are taken, as vLLM computes them by family.

A drafter with a candidate head (DFlash2, LiLiCorr) takes them from its `compute_candidates`, whose
scale and soft cap are its own, not those of `compute_logits`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor


def has_candidates(model: Any) -> bool:
    """Whether the drafter has a candidate head."""
    return hasattr(model, "compute_candidates")


def logits_processor(model: Any) -> LogitsProcessor:
    """What gives the logits of a drafter's candidates.

    A DFlash2 drafter for Beam targets has one processor for everything.
    """
    if has_candidates(model):
        return getattr(model, "candidate_logits_processor", None) or model.logits_processor
    return model.logits_processor


def whole_logits(model: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Logits of the target's vocabulary, the same on all ranks.

    Args:
        model: the drafter.
        hidden_states: [M, hidden size], the drafter's.

    Returns:
        float [M, V].

    """
    if has_candidates(model):
        return _candidate_logits(model, hidden_states, skip_gather=False)
    return model.compute_logits(hidden_states)


def shard_logits(model: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Logits of this rank's shard of the draft vocabulary, vLLM's padding included.

    Arguments as in `whole_logits`.
    """
    if has_candidates(model):
        return _candidate_logits(model, hidden_states, skip_gather=True)
    return logits_processor(model)(model.lm_head, hidden_states, skip_gather=True)


def _candidate_logits(model: Any, hidden_states: torch.Tensor, skip_gather: bool) -> torch.Tensor:
    """Logits of a candidate head.

    `LogitsProcessor.get_top_k_tokens` scales first and then caps; its `forward` does it the other
    way round.
    """
    processor = logits_processor(model)
    logits = processor._get_logits(hidden_states, model.lm_head, None, skip_gather)
    if processor.scale != 1.0:
        logits = logits.float() * processor.scale
    if processor.soft_cap is not None:
        logits = torch.tanh(logits.float() / processor.soft_cap) * processor.soft_cap
    return logits
