# SPDX-License-Identifier: Apache-2.0
"""Two functions of vLLM that are at fault on the CPU, replaced in this process."""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.v1.sample.ops import topk_topp_sampler


def patch() -> None:
    """Puts both replacements in place.

    - `v1/sample/ops/topk_topp_sampler.py`: the Triton top-k/top-p kernel does not run in the
      interpreter; vLLM's own PyTorch form takes its place.
    - `models/qwen3_dflash.py` `_normalize_context_k`: the CPU `rms_norm` reads row 0 of its 2-D
      weight for every layer, so a drafter of several layers drafts worse than it should.
    """
    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
    DFlashQwen3Model._normalize_context_k = _normalize_context_k


def _normalize_context_k(self: DFlashQwen3Model, all_k: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(all_k)
    for layer in range(all_k.shape[0]):
        ops.rms_norm(out[layer], all_k[layer], self._k_norm_weights[layer], self._rms_norm_eps)
    return out
