# SPDX-License-Identifier: Apache-2.0
"""Attention among the tree rows, merged with the attention to the prefix, in one launch a layer.

A tree row sees its ancestors and itself (DDTree, arXiv 2604.12989). The few tree rows of a request
are its last query rows, so their keys are at hand as fresh K/V rows. The prefix part was computed
by `prefix.py` or by any attention kernel that returns its log-sum-exp.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.attention.kernels.launch import packed_rows_block, triton_dtype
from vllm_ddtree.attention.kernels.scales import Scales, check_dtypes
from vllm_ddtree.attention.kernels.softmax import (
    LOG2_E,
    merge_part,
    online_softmax_step,
    soft_capped,
)


def tail_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row_masks: torch.Tensor,
    query_start_loc: torch.Tensor,
    tail_lens: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    max_tail: int,
    slot_mapping: torch.Tensor | None = None,
    small_tiles: bool = False,
    positions: torch.Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> None:
    """Write the attention output of the tree rows; rows outside trees stay as they are.

    Args:
        query: [T, Hq, Dh].
        key: [T, Hkv, Dh], this step's own rows; or, with `slot_mapping`, the cache
            [num_blocks, block_size, Hkv, Dh] that already holds them (any strides).
        value: as key.
        row_masks: int32 [T, W], ancestor bits of tree rows, own bit included.
        query_start_loc: int32 [R + 1], first row of each request.
        tail_lens: int32 [>= R], tree rows at the end of each request, 0 without a tree.
        prefix_out: [T, Hq, Dh], or [P, T, Hq, Dh] for P key segments; may be `out` itself.
        prefix_lse: float32 [Hq, T], or [P, Hq, T], natural logarithm; -inf or +inf (as
            FlashAttention 2 writes it) marks an empty part, whose output is not read.
        out: [T, Hq, Dh], written.
        scale: what scores are multiplied by.
        max_tail: upper bound of tail_lens.
        slot_mapping: int64 [T], KV slot of each row; negative: the row has no key.
        small_tiles: always take the smallest tile. Outside a graph batches of every size come, and
            each new tile size would be compiled in front of a waiting request.
        positions: int64 [T], prefix_len + depth of tree rows; read with a window.
        window: positions that a row sees, its own included; 0: all. A window of more than the
            trees' depth hides no ancestor: leave it out.
        soft_cap: as in `prefix_attention`, which must have got the same.
        sinks: [Hq], any float dtype, one more score a head in the softmax's denominator, neither
            scaled nor capped. It is counted here, so the prefix part must not hold it.
        scales: of an fp8 cache, and of fp8 queries; prefix_out holds them already.

    Raises:
        ValueError: if dtypes do not fit (see `check_dtypes`), an innermost stride is not 1, the
            masks have fewer than `max_tail` bits, or a window comes without positions.

    """
    dtype = check_dtypes(query, key, value, scales)
    if {t.stride(-1) for t in (query, key, value, row_masks, prefix_out, out)} != {1}:
        raise ValueError("tensors must be contiguous in their last dimension")
    if row_masks.shape[1] * 32 < max_tail:
        raise ValueError(
            f"{max_tail} tree rows need {triton.cdiv(max_tail, 32)} mask words, got "
            f"{row_masks.shape[1]}"
        )
    if window and positions is None:
        raise ValueError("a sliding window needs the rows' positions")
    if key.dim() != (3 if slot_mapping is None else 4):
        raise ValueError("pass rows [T, Hkv, Dh], or a cache of four dimensions with its slots")
    if prefix_out.dim() == 3:
        prefix_out, prefix_lse = prefix_out.unsqueeze(0), prefix_lse.unsqueeze(0)

    num_kv_heads, head_size = key.shape[-2:]
    group = query.shape[1] // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_size))
    # Rows have one stride over rows, caches two: over blocks and over the slots of a block.
    k_strides = key.stride()[:2] if slot_mapping is not None else (0, key.stride(0))
    v_strides = value.stride()[:2] if slot_mapping is not None else (0, value.stride(0))
    num_reqs = query_start_loc.shape[0] - 1
    block_m = 16
    if not small_tiles:
        block_m = _tile_rows(num_reqs * num_kv_heads, max_tail * group, block_d, dtype.itemsize)
    grid = (num_reqs, num_kv_heads, triton.cdiv(max_tail * group, block_m))
    _tail_attention_kernel[grid](
        query,
        key,
        value,
        row_masks,
        query_start_loc,
        tail_lens,
        slot_mapping,
        positions if window else None,
        sinks,
        scales.tensors() if scales else None,
        scales.strides() if scales else None,
        prefix_out,
        prefix_lse,
        out,
        scale * LOG2_E,
        *query.stride()[:2],
        *k_strides,
        key.stride(-2),
        *v_strides,
        value.stride(-2),
        row_masks.stride(0),
        *prefix_out.stride()[:3],
        *prefix_lse.stride(),
        *out.stride()[:2],
        PAGED=slot_mapping is not None,
        NUM_SEGMENTS=prefix_out.shape[0],
        BLOCK_SIZE=key.shape[1] if slot_mapping is not None else 1,
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=16 if max_tail <= 16 else 32,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        SINKS=sinks is not None,
        SCALED=scales is not None,
        DOT=triton_dtype(dtype),
        num_warps=4,
        num_stages=2,
    )


def _tile_rows(num_heads: int, num_packed_rows: int, block_d: int, element_size: int) -> int:
    """Rows of one program's tile.

    Small tiles spread a small batch over the GPU. Once it is full, large ones read keys less often.
    The steps are those of an H200 (heads of 128, bfloat16, 32 and 64 tree rows).

    Args:
        num_heads: (request, KV head) pairs of the batch.
        num_packed_rows: (row, head) pairs of one of them.
        block_d: the head size, rounded up.
        element_size: bytes of a number that is multiplied.

    """
    num_small = num_heads * triton.cdiv(num_packed_rows, 16)
    if num_small <= 256:
        return 16
    # An accumulator of more than 128 x 128 would not fit the registers of four warps.
    largest = 128 if num_small > 1024 else 64
    if element_size > 2 or block_d > 128:
        largest = 32
    return min(largest, packed_rows_block(num_packed_rows))


# Strides that follow the number of rows in the batch: no new kernel for each.
@triton.jit(do_not_specialize=["prefix_stride_p", "lse_stride_p", "lse_stride_h"])
def _tail_attention_kernel(
    query_ptr,  # [T, Hq, HEAD_SIZE]
    key_ptr,  # [T, Hkv, HEAD_SIZE], or [num_blocks, BLOCK_SIZE, Hkv, HEAD_SIZE] if PAGED
    value_ptr,  # as key
    row_masks_ptr,  # [T, W]
    query_start_loc_ptr,  # [R + 1]
    tail_lens_ptr,  # [R]
    slot_mapping_ptr,  # [T] if PAGED
    positions_ptr,  # [T] if WINDOW
    sinks_ptr,  # [Hq] if SINKS
    scales_ptr,  # if SCALED: of query, key and value, [Hkv] each
    scale_strides,
    prefix_out_ptr,  # [NUM_SEGMENTS, T, Hq, HEAD_SIZE]
    prefix_lse_ptr,  # [NUM_SEGMENTS, Hq, T]
    out_ptr,  # [T, Hq, HEAD_SIZE]
    scale_log2,  # softmax scale * log2(e)
    query_stride_t,
    query_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    mask_stride,
    prefix_stride_p,
    prefix_stride_t,
    prefix_stride_h,
    lse_stride_p,
    lse_stride_h,
    lse_stride_t,
    out_stride_t,
    out_stride_h,
    PAGED: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides 32: the keys of one block share a mask word
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # 0: none
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the products' factors
):
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    first_packed = tl.program_id(2) * BLOCK_M

    tail_len = tl.load(tail_lens_ptr + req)
    if first_packed >= tail_len * GROUP:
        return

    # The query heads of one KV head share its keys: (tree row, head) pairs are the tile's rows.
    packed = first_packed + tl.arange(0, BLOCK_M)
    valid = packed < tail_len * GROUP
    root = (tl.load(query_start_loc_ptr + req + 1) - tail_len).to(tl.int64)
    row = root + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_SIZE
    in_tile = valid[:, None] & in_head[None, :]
    q = tl.load(
        query_ptr + row[:, None] * query_stride_t + head[:, None] * query_stride_h + dim[None, :],
        mask=in_tile,
        other=0.0,
    )
    if SCALED:
        scale_log2 *= tl.load(scales_ptr[1] + kv_head * scale_strides[1])
        if q.dtype.is_fp8():
            scale_log2 *= tl.load(scales_ptr[0] + kv_head * scale_strides[0])
        value_scale = tl.load(scales_ptr[2] + kv_head * scale_strides[2])
        q = q.to(DOT)

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # A key whose value is 0.
        sink = tl.load(sinks_ptr + head, mask=valid, other=float("-inf")).to(tl.float32)
        running_max = sink * 1.4426950408889634
        running_sum = tl.where(sink > float("-inf"), 1.0, running_sum)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The prefix, or each segment of it, counts like one key with its log-sum-exp as the score.
    lse_rows = prefix_lse_ptr + head * lse_stride_h + row * lse_stride_t
    prefix_rows = prefix_out_ptr + row * prefix_stride_t + head * prefix_stride_h
    for _ in tl.static_range(NUM_SEGMENTS):
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

    if WINDOW > 0:
        row_position = tl.load(positions_ptr + row, mask=valid, other=0)
    # Parents come before their children: no row sees a key after itself.
    num_keys = tl.minimum((first_packed + BLOCK_M - 1) // GROUP + 1, tail_len)
    for first in range(0, num_keys, BLOCK_N):
        node = first + tl.arange(0, BLOCK_N)
        in_tail = node < num_keys
        key_row = root + node
        if PAGED:
            slot = tl.load(slot_mapping_ptr + key_row, mask=in_tail, other=-1)
            in_tail = in_tail & (slot >= 0)
            k_offset = (slot // BLOCK_SIZE) * k_stride_b + (slot % BLOCK_SIZE) * k_stride_s
            v_offset = (slot // BLOCK_SIZE) * v_stride_b + (slot % BLOCK_SIZE) * v_stride_s
        else:
            k_offset = key_row * k_stride_s
            v_offset = key_row * v_stride_s
        k = tl.load(
            key_ptr + k_offset[None, :] + kv_head * k_stride_h + dim[:, None],
            mask=in_tail[None, :] & in_head[:, None],
            other=0.0,
        )
        v = tl.load(
            value_ptr + v_offset[:, None] + kv_head * v_stride_h + dim[None, :],
            mask=in_tail[:, None] & in_head[None, :],
            other=0.0,
        )
        if SCALED:
            k = k.to(DOT)
            v = v.to(DOT)
        word = tl.load(row_masks_ptr + row * mask_stride + first // 32, mask=valid, other=0)
        sees = ((word[:, None] >> (node % 32)[None, :]) & 1) != 0
        sees = sees & in_tail[None, :]
        if WINDOW > 0:
            key_position = tl.load(positions_ptr + key_row, mask=in_tail, other=0)
            sees = sees & (row_position[:, None] - key_position[None, :] < WINDOW)

        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        if SOFT_CAP > 0:
            scores = soft_capped(scores, SOFT_CAP)
        scores = tl.where(sees, scores, float("-inf"))
        # A row may see nothing yet, or at all (those past the tail).
        weights, running_max, running_sum, acc = online_softmax_step(
            scores, running_max, running_sum, acc, MAYBE_EMPTY=True
        )
        part = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        if SCALED:
            part *= value_scale
        acc += part

    acc = acc / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
    tl.store(
        out_ptr + row[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=in_tile,
    )
