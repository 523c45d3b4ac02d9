# SPDX-License-Identifier: Apache-2.0
"""Latent attention of tail rows to the keys before the tail (multi-head latent attention).

As `prefix.py`, for caches that hold one row a token for all heads: [latent | RoPE part] is the key,
the latent alone the value (DeepSeek-V2, arXiv 2405.04434, section 2.1; cache and absorbed query as
in vLLM's v1/attention/backends/mla/triton_mla.py). It is a kernel of its own because the rows are
too long to be padded to a power of two, and a tile of them is key and value at once.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.attention.kernels.launch import shared_memory
from vllm_ddtree.attention.kernels.scales import check_latent_dtypes
from vllm_ddtree.attention.kernels.softmax import LOG2_E, online_softmax_step


def latent_prefix(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    tail_ends: torch.Tensor,
    tail_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    max_tail: int,
    block_m: int,
    cache_scale: torch.Tensor | None = None,
) -> None:
    """Write output and log-sum-exp of the tail rows over keys [0, prefix_len); other rows stay.

    An empty prefix or segment gives lse -inf and leaves its part of out as it is.

    Args:
        query: [T, Hq, rank], the query, W_UK absorbed.
        query_rope: [T, Hq, rope].
        cache: [num_blocks, block_size, rank + rope], any strides, innermost contiguous.
        block_table: int32 [R, max_blocks], blocks of each request.
        tail_ends: int32 [>= R], row after the last tail row of each request.
        tail_lens: int32 [>= R], rows of each request's tail, 0: none.
        prefix_lens: int32 [>= R], keys before the tail.
        out: float32 or the query's dtype [P, T, Hq, rank] for P key segments; written.
        lse: float32 [P, Hq, T], natural logarithm; written.
        scale: what scores are multiplied by.
        max_tail: upper bound of tail_lens.
        block_m: (row, head) pairs of one program, see `tile_rows`.
        cache_scale: float32, one element, what the numbers of an fp8 cache are multiplied by.

    Raises:
        ValueError: if dtypes do not fit (see `check_latent_dtypes`), or an innermost stride is
            not 1.

    """
    check_latent_dtypes(query, query_rope, cache, cache_scale)
    if {t.stride(-1) for t in (query, query_rope, cache, out)} != {1}:
        raise ValueError("query, cache and output must be contiguous in their last dimension")

    group, rank = query.shape[1:]
    rope = cache.shape[-1] - rank
    num_segments = out.shape[0]
    grid = (block_table.shape[0], triton.cdiv(max_tail * group, block_m) * num_segments)
    _latent_prefix_kernel[grid](
        query,
        query_rope,
        cache,
        cache_scale,
        block_table,
        tail_ends,
        tail_lens,
        prefix_lens,
        out,
        lse,
        scale * LOG2_E,
        num_segments,
        *query.stride()[:2],
        *query_rope.stride()[:2],
        *cache.stride()[:2],
        block_table.stride(0),
        *out.stride()[:3],
        *lse.stride(),
        BLOCK_SIZE=cache.shape[1],
        GROUP=group,
        RANK=rank,
        ROPE=rope,
        BLOCK_RANK=max(16, triton.next_power_of_2(rank)),
        BLOCK_ROPE=max(16, triton.next_power_of_2(rope)),
        BLOCK_M=block_m,
        BLOCK_N=32,
        SCALED=cache_scale is not None,
        num_warps=8 if block_m > 16 else 4,
        num_stages=num_stages(block_m, cache),
    )


def tile_rows(num_packed_rows: int, row_bytes: int, device: torch.device) -> int:
    """(row, head) pairs of one program: the tall tile reads keys less often, where it fits.

    Args:
        num_packed_rows: (row, head) pairs of the longest tail.
        row_bytes: bytes of one cached row in the queries' dtype.
        device: where the kernel runs.

    """
    # An accumulator of 64 x 512 fits the registers of eight warps, beside 16-bit operands.
    tall = _fits(64, row_bytes, device) and row_bytes <= 1280
    return 64 if tall and num_packed_rows > 32 else 16


def num_stages(block_m: int, cache: torch.Tensor) -> int:
    """2, to load keys while others are multiplied, where the shared memory holds both; else 1."""
    # An fp8 row is multiplied in 16 bits.
    row_bytes = cache.shape[-1] * max(2, cache.element_size())
    return 2 if _fits(block_m, row_bytes, cache.device) else 1


def _fits(block_m: int, row_bytes: int, device: torch.device) -> bool:
    """Whether queries and two stages of 32 keys fit the shared memory.

    A third is added for what else is kept there. (vLLM's kernel of 16 rows and two stages needs
    100 KiB, more than many GPUs have.)
    """
    return (block_m + 2 * 32) * row_bytes * 4 // 3 <= shared_memory(device)


def latent_segments(num_reqs: int, num_packed_rows: int, block_m: int, num_sms: int) -> int:
    """Key segments that give each of ``num_sms`` multiprocessors one program.

    The number depends on the padded batch only, so a captured graph always meets the same one.
    """
    programs = max(1, num_reqs * triton.cdiv(num_packed_rows, block_m))
    return max(1, min(64, num_sms // programs))


# What follows the number of rows in the batch must not make a new kernel each time.
@triton.jit(do_not_specialize=["num_segments", "out_stride_p", "lse_stride_p", "lse_stride_h"])
def _latent_prefix_kernel(
    query_ptr,  # [T, GROUP, RANK]
    query_rope_ptr,  # [T, GROUP, ROPE]
    cache_ptr,  # [num_blocks, BLOCK_SIZE, RANK + ROPE]
    cache_scale_ptr,  # [] if SCALED
    block_table_ptr,  # [R, max_blocks]
    tail_ends_ptr,  # [R]
    tail_lens_ptr,  # [R]
    prefix_lens_ptr,  # [R]
    out_ptr,  # [num_segments, T, GROUP, RANK]
    lse_ptr,  # [num_segments, GROUP, T]
    scale_log2,  # softmax scale * log2(e)
    num_segments,
    query_stride_t,
    query_stride_h,
    rope_stride_t,
    rope_stride_h,
    cache_stride_b,
    cache_stride_s,
    table_stride,
    out_stride_p,
    out_stride_t,
    out_stride_h,
    lse_stride_p,
    lse_stride_h,
    lse_stride_t,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    segment = (tl.program_id(1) % num_segments).to(tl.int64)
    row_block = tl.program_id(1) // num_segments

    tail_len = tl.load(tail_lens_ptr + req)
    if row_block * BLOCK_M >= tail_len * GROUP:
        return

    # All heads share the keys: (row, head) pairs are the tile's rows.
    packed = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = packed < tail_len * GROUP
    row = (tl.load(tail_ends_ptr + req) - tail_len + packed // GROUP).to(tl.int64)
    head = (packed % GROUP).to(tl.int64)
    lse_rows = lse_ptr + segment * lse_stride_p + head * lse_stride_h + row * lse_stride_t

    prefix_len = tl.load(prefix_lens_ptr + req)
    segment_len = tl.cdiv(tl.cdiv(prefix_len, num_segments), BLOCK_N) * BLOCK_N
    start = segment.to(tl.int32) * segment_len
    end = tl.minimum(start + segment_len, prefix_len)
    if start >= end:
        tl.store(lse_rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=valid)
        return

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
        scale_log2 *= tl.load(cache_scale_ptr)

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    for first in range(start, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        in_prefix = position < end
        block = tl.load(
            block_table_ptr + req * table_stride + position // BLOCK_SIZE, mask=in_prefix, other=0
        ).to(tl.int64)
        offset = (position % BLOCK_SIZE).to(tl.int64)
        rows = cache_ptr + block * cache_stride_b + offset * cache_stride_s
        # Masked loads: what lies behind the prefix may be garbage, and 0 * NaN is NaN.
        latent = tl.load(
            rows[:, None] + dim[None, :], mask=in_prefix[:, None] & in_rank[None, :], other=0.0
        )
        k_rope = tl.load(
            rows[None, :] + RANK + rope_dim[:, None],
            mask=in_prefix[None, :] & in_rope[:, None],
            other=0.0,
        )
        if SCALED:
            latent = latent.to(q.dtype)
            k_rope = k_rope.to(q.dtype)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores += tl.dot(q_rope, k_rope, input_precision="ieee")
        scores = tl.where(in_prefix[None, :], scores * scale_log2, float("-inf"))
        # Every block starts inside the segment, and all rows see it.
        weights, running_max, running_sum, acc = online_softmax_step(
            scores, running_max, running_sum, acc, MAYBE_EMPTY=False
        )
        acc += tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")

    acc = acc / running_sum[:, None]
    if SCALED:
        acc *= tl.load(cache_scale_ptr)
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
    tl.store(lse_rows, (running_max + tl.log2(running_sum)) * 0.6931471805599453, mask=valid)
