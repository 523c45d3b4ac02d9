# SPDX-License-Identifier: Apache-2.0
"""The candidates of the whole vocabulary from those of its shards, one a tensor-parallel rank.

A token among the `top_k` best of all is among the `top_k` best of its shard. So `top_k` candidates
a rank, and each rank's share of the log-sum-exp, are enough. Every rank merges the same numbers in
the same order, and so holds the same bits.

The ids are those of `top_k_log_probs` over the whole vocabulary, ties included, because the same
logits are compared. The log-probs of a row may all differ from it by one rounding of the
log-sum-exp, which is summed in another order.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.proposer.candidates import check_out, log_of, sum_parts, value_of


def merge_shards(keys: torch.Tensor, out_log_probs: torch.Tensor, out_ids: torch.Tensor) -> None:
    """Write the `top_k` best tokens of each row and their log-probs over the whole vocabulary.

    Reads and writes only device memory and allocates nothing.

    Args:
        keys: int64 [shards, M, k + 1], contiguous, `top_k_keys` of every shard; together the shards
            have at least k tokens.
        out_log_probs: float32 [M, k], out, as in `top_k_log_probs`; contiguous in the last
            dimension.
        out_ids: int64 [M, k], out, as in `top_k_log_probs`; contiguous in the last dimension.

    Raises:
        ValueError: a shape or dtype does not fit.

    """
    num_shards, num_rows, num_keys = keys.shape
    top_k = num_keys - 1
    if keys.dtype != torch.int64 or not keys.is_contiguous():
        raise ValueError(f"keys must be contiguous int64 [shards, M, k + 1], got {keys.dtype}")
    check_out("out_log_probs", out_log_probs, (num_rows, top_k), torch.float32)
    check_out("out_ids", out_ids, (num_rows, top_k), torch.int64)
    if num_rows == 0:
        return
    # On the CPU Triton's interpreter pays by the operation: there one program takes many rows.
    rows_per_program = 1
    if keys.device.type == "cpu":
        rows_per_program = min(64, triton.next_power_of_2(num_rows))
    _merge_kernel[(triton.cdiv(num_rows, rows_per_program),)](
        keys,
        out_log_probs,
        out_log_probs.stride(0),
        out_ids,
        out_ids.stride(0),
        num_rows,
        NUM_SHARDS=num_shards,
        TOP_K=top_k,
        ROWS=rows_per_program,
        SHARDS_BLOCK=triton.next_power_of_2(num_shards),
        KEYS_BLOCK=triton.next_power_of_2(num_shards * top_k),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    keys_ptr,  # int64 [shards, M, k + 1]
    out_log_probs_ptr,  # float32 [M, k]
    out_log_probs_stride,
    out_ids_ptr,  # int64 [M, k]
    out_ids_stride,
    num_rows,
    NUM_SHARDS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    SHARDS_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr,
):
    LEAST: tl.constexpr = -9223372036854775808
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_batch = row < num_rows
    row_ptrs = keys_ptr + (row * (TOP_K + 1))[:, None]
    shard_stride = tl.cast(num_rows, tl.int64) * (TOP_K + 1)

    shard = tl.arange(0, SHARDS_BLOCK)[None, :]
    in_row = in_batch[:, None] & (shard < NUM_SHARDS)
    share = tl.load(row_ptrs + shard * shard_stride + TOP_K, mask=in_row, other=0)
    best = (share >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    shift, total = sum_parts(best, share.to(tl.int32).to(tl.float32, bitcast=True))
    log_total = log_of(total)

    place = tl.arange(0, KEYS_BLOCK)[None, :]
    in_row = in_batch[:, None] & (place < NUM_SHARDS * TOP_K)
    key_ptrs = row_ptrs + place // TOP_K * shard_stride + place % TOP_K
    keys = tl.load(key_ptrs, mask=in_row, other=LEAST)  # [ROWS, KEYS_BLOCK], no two alike
    for rank in range(TOP_K):
        key = tl.max(keys, axis=1)
        keys = tl.where(keys == key[:, None], LEAST, keys)
        value = value_of((key >> 32).to(tl.int32)) - shift - log_total
        token = 0x7FFFFFFF - (key & 0x7FFFFFFF)
        tl.store(out_log_probs_ptr + row * out_log_probs_stride + rank, value, mask=in_batch)
        tl.store(out_ids_ptr + row * out_ids_stride + rank, token, mask=in_batch)
