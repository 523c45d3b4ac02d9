# SPDX-License-Identifier: Apache-2.0
"""Attention of tree rows to the keys before the tree, for any GPU.

All tree rows of a request see the whole prefix, so this pass needs no mask. Only in a layer with a
sliding window, which counts positions along the branch, a row starts later the deeper it lies.

The pass returns the log-sum-exp of the scores beside the output, and `tail.py` merges both with the
attention among the tree rows themselves (DDTree, arXiv 2604.12989; merging as in vLLM's
v1/attention/ops/triton_merge_attn_states.py). The keys can be cut into segments that run in
parallel (flash decoding): a small batch alone would leave most of a GPU idle.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.attention.kernels.launch import packed_rows_block, triton_dtype
from vllm_ddtree.attention.kernels.scales import Scales, check_dtypes
from vllm_ddtree.attention.kernels.softmax import LOG2_E, online_softmax_step, soft_capped


def prefix_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    tail_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    max_tail: int,
    positions: torch.Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    scales: Scales | None = None,
) -> None:
    """Write output and log-sum-exp of the tree rows over keys [0, prefix_len); other rows stay.

    An empty prefix or segment, and one that lies outside a row's window, gives out 0 and lse -inf.
    `choose_num_segments` says how many segments fill a GPU.

    Args:
        query: [T, Hq, Dh].
        k_cache: [num_blocks, block_size, Hkv, Dh], any strides, innermost contiguous.
        v_cache: as k_cache.
        block_table: int32 [R, max_blocks], blocks of each request.
        query_start_loc: int32 [R + 1], first row of each request.
        tail_lens: int32 [>= R], tree rows at the end of each request, 0 without a tree.
        prefix_lens: int32 [>= R], keys before the tree rows.
        out: float32 or the query's dtype [T, Hq, Dh], or [P, T, Hq, Dh] for P key segments;
            written.
        lse: float32 [Hq, T], or [P, Hq, T], natural logarithm; written.
        scale: what scores are multiplied by.
        max_tail: upper bound of tail_lens.
        positions: int64 [T], prefix_len + depth of tree rows; read with a window.
        window: positions that a row sees, its own included; 0: all. Keys before the root's window
            are not read.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); 0: they stay.
        scales: of an fp8 cache, and of fp8 queries.

    Raises:
        ValueError: if dtypes do not fit (see `check_dtypes`), an innermost stride is not 1, or a
            window comes without positions.

    """
    dtype = check_dtypes(query, k_cache, v_cache, scales)
    if {t.stride(-1) for t in (query, k_cache, v_cache, out)} != {1}:
        raise ValueError("query, caches and output must be contiguous in the head dimension")
    if window and positions is None:
        raise ValueError("a sliding window needs the rows' positions")
    if out.dim() == 3:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)

    num_kv_heads, head_size = k_cache.shape[2:]
    group = query.shape[1] // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_size))
    # What fits the registers: 16-bit heads of up to 128 take tall tiles.
    fits = dtype.itemsize == 2 and block_d <= 128
    block_m = min(128 if fits else 32, packed_rows_block(max_tail * group))
    block_n = 64 if fits else 32
    num_segments = out.shape[0]
    grid = (
        query_start_loc.shape[0] - 1,
        num_kv_heads,
        triton.cdiv(max_tail * group, block_m) * num_segments,
    )
    _prefix_attention_kernel[grid](
        query,
        k_cache,
        v_cache,
        block_table,
        query_start_loc,
        tail_lens,
        prefix_lens,
        positions if window else None,
        scales.tensors() if scales else None,
        scales.strides() if scales else None,
        out,
        lse,
        scale * LOG2_E,
        num_segments,
        *query.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *out.stride()[:3],
        *lse.stride(),
        BLOCK_SIZE=k_cache.shape[1],
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        SCALED=scales is not None,
        DOT=triton_dtype(dtype),
        num_warps=8 if block_m == 128 else 4,
        num_stages=2,
    )


def choose_num_segments(
    num_reqs: int,
    num_kv_heads: int,
    max_tail: int,
    group: int,
    num_sms: int,
    max_segments: int = 16,
) -> int:
    """Key segments of `prefix_attention` that give each multiprocessor of a GPU work.

    The number depends on the padded batch only, so a captured graph always meets the same one. It
    is a power of two, so that there are few kernels to compile.

    Args:
        num_reqs: requests of the padded batch.
        num_kv_heads: KV heads of a layer.
        max_tail: rows of the longest tree.
        group: query heads of one KV head.
        num_sms: multiprocessors.
        max_segments: upper bound of the number, a power of two.

    """
    # Fastest on an H200: per multiprocessor, 128 (row, head) pairs of one KV head.
    programs = max(1, num_reqs * num_kv_heads * triton.cdiv(max_tail * group, 64))
    return max(1, min(max_segments, 2 * num_sms // programs))


# What follows the number of rows in the batch must not make a new kernel each time.
@triton.jit(do_not_specialize=["num_segments", "out_stride_p", "lse_stride_p", "lse_stride_h"])
def _prefix_attention_kernel(
    query_ptr,  # [T, Hq, HEAD_SIZE]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, HEAD_SIZE]
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, HEAD_SIZE]
    block_table_ptr,  # [R, max_blocks]
    query_start_loc_ptr,  # [R + 1]
    tail_lens_ptr,  # [R]
    prefix_lens_ptr,  # [R]
    positions_ptr,  # [T] if WINDOW
    scales_ptr,  # if SCALED: of query, key and value, [Hkv] each
    scale_strides,
    out_ptr,  # [num_segments, T, Hq, HEAD_SIZE]
    lse_ptr,  # [num_segments, Hq, T]
    scale_log2,  # softmax scale * log2(e)
    num_segments,
    query_stride_t,
    query_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    table_stride,
    out_stride_p,
    out_stride_t,
    out_stride_h,
    lse_stride_p,
    lse_stride_h,
    lse_stride_t,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # 0: none
    SCALED: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the products' factors
):
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    segment = (tl.program_id(2) % num_segments).to(tl.int64)
    row_block = tl.program_id(2) // num_segments

    tail_len = tl.load(tail_lens_ptr + req)
    if row_block * BLOCK_M >= tail_len * GROUP:
        return

    # The query heads of one KV head share its keys: (tree row, head) pairs are the tile's rows.
    packed = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = packed < tail_len * GROUP
    row = (tl.load(query_start_loc_ptr + req + 1) - tail_len + packed // GROUP).to(tl.int64)
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
        q = q.to(DOT)

    prefix_len = tl.load(prefix_lens_ptr + req)
    first_key = 0
    if WINDOW > 0:
        # The root sees most of the prefix.
        first_key = tl.maximum(prefix_len - WINDOW + 1, 0)
        row_first_key = tl.load(positions_ptr + row, mask=valid, other=0).to(tl.int32) - WINDOW + 1
    segment_len = tl.cdiv(tl.cdiv(prefix_len - first_key, num_segments), BLOCK_N) * BLOCK_N
    start = first_key + segment.to(tl.int32) * segment_len
    end = tl.minimum(start + segment_len, prefix_len)

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(start, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        in_prefix = position < end
        block = tl.load(
            block_table_ptr + req * table_stride + position // BLOCK_SIZE, mask=in_prefix, other=0
        ).to(tl.int64)
        offset = (position % BLOCK_SIZE).to(tl.int64)
        # Masked loads: what lies behind the prefix may be garbage, and 0 * NaN is NaN.
        k = tl.load(
            k_cache_ptr
            + block[None, :] * k_stride_b
            + offset[None, :] * k_stride_s
            + kv_head * k_stride_h
            + dim[:, None],
            mask=in_prefix[None, :] & in_head[:, None],
            other=0.0,
        )
        v = tl.load(
            v_cache_ptr
            + block[:, None] * v_stride_b
            + offset[:, None] * v_stride_s
            + kv_head * v_stride_h
            + dim[None, :],
            mask=in_prefix[:, None] & in_head[None, :],
            other=0.0,
        )
        if SCALED:
            k = k.to(DOT)
            v = v.to(DOT)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        if SOFT_CAP > 0:
            scores = soft_capped(scores, SOFT_CAP)
        seen = in_prefix[None, :]
        if WINDOW > 0:
            seen = seen & (position[None, :] >= row_first_key[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        # Every block starts inside the prefix, so only a window can hide all of it.
        weights, running_max, running_sum, acc = online_softmax_step(
            scores, running_max, running_sum, acc, MAYBE_EMPTY=WINDOW > 0
        )
        acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")

    empty = running_sum == 0.0
    acc = acc / tl.where(empty, 1.0, running_sum)[:, None]
    if SCALED:
        acc *= tl.load(scales_ptr[2] + kv_head * scale_strides[2])
    tl.store(
        out_ptr
        + segment * out_stride_p
        + row[:, None] * out_stride_t
        + head[:, None] * out_stride_h
        + dim[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=in_tile,
    )
    # log2 to natural logarithm: times ln 2.
    log_sum = (running_max + tl.log2(tl.where(empty, 1.0, running_sum))) * 0.6931471805599453
    tl.store(
        lse_ptr + segment * lse_stride_p + head * lse_stride_h + row * lse_stride_t,
        log_sum,
        mask=valid,
    )
