# SPDX-License-Identifier: Apache-2.0
"""Functions of vLLM that are replaced in this process: two are at fault on the CPU, and one would
let an engine hang."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.v1.engine.core_client import InprocClient, MPClient
from vllm.v1.sample.ops import topk_topp_sampler


def patch() -> None:
    """Puts the replacements in place.

    - `v1/sample/ops/topk_topp_sampler.py`: the Triton top-k/top-p kernel does not run in the
      interpreter; vLLM's own PyTorch form takes its place.
    - `models/qwen3_dflash.py` `_normalize_context_k`: the CPU `rms_norm` reads row 0 of its 2-D
      weight for every layer, so a drafter of several layers drafts worse than it should.
    - `v1/engine/core_client.py`: a front end that is about to start an engine that compiles its
      model is refused. Here the engine would compile for ever.
    """
    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
    DFlashQwen3Model._normalize_context_k = _normalize_context_k
    for client in (InprocClient, MPClient):
        if not hasattr(client.__init__, "__wrapped__"):
            client.__init__ = _eager_only(client.__init__)


def _eager_only(init: Any) -> Any:
    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        given = (*args, *kwargs.values())
        model = next(v.model_config for v in given if isinstance(v, VllmConfig))
        if model is not None and not model.enforce_eager:
            raise ValueError(
                "the CPU test bed cannot compile models: give --enforce-eager (enforce_eager=True)"
            )
        init(self, *args, **kwargs)

    return checked


def _normalize_context_k(self: DFlashQwen3Model, all_k: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(all_k)
    for layer in range(all_k.shape[0]):
        ops.rms_norm(out[layer], all_k[layer], self._k_norm_weights[layer], self._rms_norm_eps)
    return out
