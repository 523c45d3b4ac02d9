# SPDX-License-Identifier: Apache-2.0
"""Making an engine's configuration on a machine without a GPU.

vLLM's builds for CUDA name no device there and make no configuration. Its own jobs on such machines
set `VLLM_TARGET_DEVICE=cpu`. Model Runner V2 asks for Triton, which finds no driver there; a GPU's
machine has both. No kernel runs, so what a configuration says of a pair is the same.
"""

from __future__ import annotations

import os

STAND_INS = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def without_gpu() -> bool:
    """Whether this machine has no accelerator that PyTorch knows."""
    import torch

    return not torch.accelerator.is_available()


def stand_in() -> None:
    """Let configurations be made as where a GPU is. Before vLLM is imported.

    A variable that is set keeps its value.
    """
    for name, value in STAND_INS.items():
        os.environ.setdefault(name, value)
    from vllm.config import vllm as configs

    configs.HAS_TRITON = True
