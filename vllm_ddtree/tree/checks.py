# SPDX-License-Identifier: Apache-2.0
"""What both builders ask of their arguments: shapes, dtypes, limits. Contents are not looked at."""

from __future__ import annotations

import torch

from vllm_ddtree.round.trees import MAX_DEPTH, TreeBuffers

MAX_TOP_K = 64


def check_build(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    indices: torch.Tensor,
    trees: TreeBuffers,
    draft_tokens: torch.Tensor,
    depth_limit: int,
) -> None:
    """Check what a builder is given, but for the dimensions of `log_probs` behind the second.

    Args:
        log_probs: [R, D, ..., K].
        token_ids: int32 or int64 [R, D, K].
        indices: int32 or int64 [R].
        trees: for a budget of the columns of `draft_tokens`.
        draft_tokens: int64 [R, budget].
        depth_limit: deepest node, 1 to D.

    Raises:
        ValueError: a shape, dtype, stride or limit does not fit.

    """
    num_reqs, num_depths = log_probs.shape[:2]
    top_k = log_probs.shape[-1]
    if not (1 <= num_depths <= MAX_DEPTH and 1 <= top_k <= MAX_TOP_K):
        raise ValueError(
            f"log_probs has D = {num_depths} and K = {top_k}; "
            f"pass 1 <= D <= {MAX_DEPTH} positions and 1 <= K <= {MAX_TOP_K} candidates"
        )
    shape = (num_reqs, num_depths, top_k)
    if token_ids.shape != shape or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"token_ids must be int32 or int64 {list(shape)} like log_probs, "
            f"got {token_ids.dtype} {list(token_ids.shape)}"
        )
    if indices.shape != (num_reqs,) or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indices must be int32 or int64 [{num_reqs}], "
            f"got {indices.dtype} {list(indices.shape)}"
        )
    if not indices.is_contiguous():
        raise ValueError(f"indices has stride {indices.stride(0)}; make it contiguous")
    if draft_tokens.shape != (num_reqs, trees.budget) or draft_tokens.dtype != torch.int64:
        raise ValueError(
            f"draft_tokens must be int64 [{num_reqs}, {trees.budget}], "
            f"got {draft_tokens.dtype} {list(draft_tokens.shape)}"
        )
    for name, tensor in (
        ("log_probs", log_probs),
        ("token_ids", token_ids),
        ("draft_tokens", draft_tokens),
    ):
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension; "
                "make it contiguous there"
            )
    if not 1 <= depth_limit <= num_depths:
        raise ValueError(
            f"depth_limit must be between 1 and the {num_depths} positions of log_probs, "
            f"got {depth_limit}"
        )
