# SPDX-License-Identifier: Apache-2.0
"""What the kernels over tree rows ask of their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import triton

if TYPE_CHECKING:
    from vllm_ddtree.recurrent.layer import StateLayer
    from vllm_ddtree.recurrent.rows import TreeStep


def check_contiguous(*tensors: torch.Tensor) -> None:
    """Raise ValueError if one is not contiguous in its last dimension: kernels take no stride."""
    if {t.stride(-1) for t in tensors} != {1}:
        raise ValueError("tensors must be contiguous in their last dimension")


def check_masks(step: TreeStep) -> None:
    """Raise ValueError if the masks have fewer than `step.max_tail` bits."""
    if step.masks.shape[1] * 32 < step.max_tail:
        raise ValueError(
            f"{step.max_tail} tree rows need {triton.cdiv(step.max_tail, 32)} mask words, got "
            f"{step.masks.shape[1]}"
        )


def check_convolution(
    layer: StateLayer,
    step: TreeStep,
    inputs: torch.Tensor,
    out: torch.Tensor,
    stash: torch.Tensor,
) -> None:
    """Raise ValueError if dtypes differ, a tensor is not contiguous in its last dimension, or
    `step` was prepared for another width.
    """
    if layer.width != step.rows.width:
        raise ValueError(f"the rows have taps for a width of {step.rows.width}, not {layer.width}")
    if {t.dtype for t in (inputs, layer.conv_states, out, stash)} != {inputs.dtype}:
        raise ValueError("inputs, committed inputs, outputs and stash must have one dtype")
    check_contiguous(inputs, out, stash)
