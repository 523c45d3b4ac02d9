# SPDX-License-Identifier: Apache-2.0
"""Latent attention among the tail rows, merged with the attention to the prefix.

As `tail.py`, for the cache of multi-head latent attention (see `latent_prefix.py`). A tree row sees
its ancestors and itself (DDTree, arXiv 2604.12989). Without masks a row sees all rows before it, as
a chain's and a prefill's do.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.attention.kernels.latent_prefix import num_stages
from vllm_ddtree.attention.kernels.scales import check_latent_dtypes
from vllm_ddtree.attention.kernels.softmax import LOG2_E, merge_part, online_softmax_step

TILE_ROWS = 16
"""(row, head) pairs of one program."""


def latent_tail(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    row_masks: torch.Tensor | None,
    tail_ends: torch.Tensor,
    tail_lens: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    num_reqs: int,
    max_tail: int,
    cache_scale: torch.Tensor | None = None,
) -> None:
    """Write the attention output of the tail rows; other rows stay as they are.

    Args:
        query: [T, Hq, rank], the query, W_UK absorbed.
        query_rope: [T, Hq, rope].
        cache: [num_blocks, block_size, rank + rope], this step's rows already written.
        slot_mapping: int64 [>= T], KV slot of each row; negative: the row has no key.
        row_masks: int32 [>= T, W], ancestor bits, own bit included; None: causal.
        tail_ends: int32 [>= R], row after the last tail row of each request.
        tail_lens: int32 [>= R], rows of each request's tail, 0: none.
        prefix_out: [P, T, Hq, rank] for P key segments; with P = 1 it may be `out` itself.
        prefix_lse: float32 [P, Hq, T], natural logarithm; -inf or +inf (as FlashMLA has it) marks
            an empty part, whose output is not read.
        out: [T, Hq, rank], written.
        scale: what scores are multiplied by.
        num_reqs: R.
        max_tail: upper bound of tail_lens.
        cache_scale: float32, one element, what the numbers of an fp8 cache are multiplied by;
            prefix_out holds it already.

    Raises:
        ValueError: if dtypes do not fit (see `check_latent_dtypes`), an innermost stride is not 1,
            or the masks have fewer than `max_tail` bits.

    """
    check_latent_dtypes(query, query_rope, cache, cache_scale)
    if {t.stride(-1) for t in (query, query_rope, cache, prefix_out, out)} != {1}:
        raise ValueError("tensors must be contiguous in their last dimension")
    if row_masks is not None and row_masks.shape[1] * 32 < max_tail:
        raise ValueError(
            f"{max_tail} tail rows need {triton.cdiv(max_tail, 32)} mask words, got "
            f"{row_masks.shape[1]}"
        )
    group, rank = query.shape[1:]
    rope = cache.shape[-1] - rank
    block_m = TILE_ROWS
    grid = (num_reqs, triton.cdiv(max_tail * group, block_m))
    _latent_tail_kernel[grid](
        query,
        query_rope,
        cache,
        cache_scale,
        slot_mapping,
        row_masks,
        tail_ends,
        tail_lens,
        prefix_out,
        prefix_lse,
        out,
        scale * LOG2_E,
        prefix_out.shape[0],
        *query.stride()[:2],
        *query_rope.stride()[:2],
        *cache.stride()[:2],
        row_masks.stride(0) if row_masks is not None else 0,
        *prefix_out.stride()[:3],
        *prefix_lse.stride(),
        *out.stride()[:2],
        CAUSAL=row_masks is None,
        SCALED=cache_scale is not None,
        BLOCK_SIZE=cache.shape[1],
        GROUP=group,
        RANK=rank,
        ROPE=rope,
        BLOCK_RANK=max(16, triton.next_power_of_2(rank)),
        BLOCK_ROPE=max(16, triton.next_power_of_2(rope)),
        BLOCK_M=block_m,
        BLOCK_N=16 if max_tail <= 16 else 32,
        num_warps=8 if block_m > 16 else 4,
        num_stages=num_stages(block_m, cache),
    )


# What follows the number of rows in the batch must not make a new kernel each time.
@triton.jit(do_not_specialize=["num_segments", "prefix_stride_p", "lse_stride_p", "lse_stride_h"])
def _latent_tail_kernel(
    query_ptr,  # [T, GROUP, RANK]
    query_rope_ptr,  # [T, GROUP, ROPE]
    cache_ptr,  # [num_blocks, BLOCK_SIZE, RANK + ROPE]
    cache_scale_ptr,  # [] if SCALED
    slot_mapping_ptr,  # [T]
    row_masks_ptr,  # [T, W], or None if CAUSAL
    tail_ends_ptr,  # [R]
    tail_lens_ptr,  # [R]
    prefix_out_ptr,  # [num_segments, T, GROUP, RANK]
    prefix_lse_ptr,  # [num_segments, GROUP, T]
    out_ptr,  # [T, GROUP, RANK]
    scale_log2,  # softmax scale * log2(e)
    num_segments,
    query_stride_t,
    query_stride_h,
    rope_stride_t,
    rope_stride_h,
    cache_stride_b,
    cache_stride_s,
    mask_stride,
    prefix_stride_p,
    prefix_stride_t,
    prefix_stride_h,
    lse_stride_p,
    lse_stride_h,
    lse_stride_t,
    out_stride_t,
    out_stride_h,
    CAUSAL: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides 32: the keys of one block share a mask word
):
    req = tl.program_id(0).to(tl.int64)
    first_packed = tl.program_id(1) * BLOCK_M

    tail_len = tl.load(tail_lens_ptr + req)
    if first_packed >= tail_len * GROUP:
        return

    # All heads share the keys: (row, head) pairs are the tile's rows.
    packed = first_packed + tl.arange(0, BLOCK_M)
    valid = packed < tail_len * GROUP
    own = packed // GROUP
    root = (tl.load(tail_ends_ptr + req) - tail_len).to(tl.int64)
    row = root + own
    head = (packed % GROUP).to(tl.int64)
    dim = tl.arange(0, BLOCK_RANK)
    rope_dim = tl.arange(0, BLOCK_ROPE)
    in_rank = dim < RANK
    in_rope = rope_dim < ROPE
    in_tile = valid[:, None] & in_rank[None, :]
    q = tl.load(
        query_ptr + row[:, None] * query_stride_t + head[:, None] * query_stride_h + dim[None, :],
        mask=in_tile,
        other=0.0,
    )
    q_rope = tl.load(
        query_rope_ptr
        + row[:, None] * rope_stride_t
        + head[:, None] * rope_stride_h
        + rope_dim[None, :],
        mask=valid[:, None] & in_rope[None, :],
        other=0.0,
    )
    if SCALED:
        value_scale = tl.load(cache_scale_ptr)
        scale_log2 *= value_scale

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    # Each segment of the prefix counts like one key with its log-sum-exp as the score.
    lse_rows = prefix_lse_ptr + head * lse_stride_h + row * lse_stride_t
    prefix_rows = prefix_out_ptr + row * prefix_stride_t + head * prefix_stride_h
    for _ in range(num_segments):
        running_max, running_sum, acc = merge_part(
            lse_rows,
            prefix_rows[:, None] + dim[None, :],
            valid,
            in_tile,
            running_max,
            running_sum,
            acc,
        )
        # Pointers move on by one stride: a product of segment and stride could exceed 32 bits.
        lse_rows += lse_stride_p
        prefix_rows += prefix_stride_p

    # Parents come before their children: no row sees a key after itself.
    num_keys = tl.minimum((first_packed + BLOCK_M - 1) // GROUP + 1, tail_len)
    for first in range(0, num_keys, BLOCK_N):
        node = first + tl.arange(0, BLOCK_N)
        in_tail = node < num_keys
        slot = tl.load(slot_mapping_ptr + root + node, mask=in_tail, other=-1).to(tl.int64)
        in_tail = in_tail & (slot >= 0)
        rows = (
            cache_ptr + (slot // BLOCK_SIZE) * cache_stride_b + (slot % BLOCK_SIZE) * cache_stride_s
        )
        latent = tl.load(
            rows[:, None] + dim[None, :], mask=in_tail[:, None] & in_rank[None, :], other=0.0
        )
        k_rope = tl.load(
            rows[None, :] + RANK + rope_dim[:, None],
            mask=in_tail[None, :] & in_rope[:, None],
            other=0.0,
        )
        if SCALED:
            latent = latent.to(q.dtype)
            k_rope = k_rope.to(q.dtype)
        if CAUSAL:
            sees = own[:, None] >= node[None, :]
        else:
            word = tl.load(row_masks_ptr + row * mask_stride + first // 32, mask=valid, other=0)
            sees = ((word[:, None] >> (node % 32)[None, :]) & 1) != 0
        sees = sees & in_tail[None, :]

        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores += tl.dot(q_rope, k_rope, input_precision="ieee")
        scores = tl.where(sees, scores * scale_log2, float("-inf"))
        # A row may see nothing yet, or at all (those past the tail).
        weights, running_max, running_sum, acc = online_softmax_step(
            scores, running_max, running_sum, acc, MAYBE_EMPTY=True
        )
        part = tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")
        if SCALED:
            part *= value_scale
        acc += part

    acc = acc / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
    tl.store(
        out_ptr + row[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=in_tile,
    )
