# SPDX-License-Identifier: Apache-2.0
"""The two Triton passes, prefix and tail, give what the reference gives."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from vllm.triton_utils import tl

from vllm_ddtree.attention.kernels import tail
from vllm_ddtree.attention.kernels.prefix import choose_num_segments, prefix_attention
from vllm_ddtree.attention.kernels.reference import (
    gather_cache,
    masked_attention,
)
from vllm_ddtree.attention.kernels.tail import tail_attention

from .tree_cases import Batch, Request, chunk, make_batch, reference_output, tree

UNTOUCHED = 77.0
MIXED = [chunk(30, 5), tree(37, 8), chunk(40, 1), tree(0, 5, before=3), tree(16, 1 + 7)]


def expected_output(batch: Batch) -> torch.Tensor:
    """float64 output for tree rows, UNTOUCHED elsewhere."""
    out = reference_output(batch)
    out[~batch.tree_rows] = UNTOUCHED
    return out


def run_prefix(
    batch: Batch, max_tail: int, num_segments: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    total, num_heads, head_size = batch.query.shape
    out = torch.full((num_segments, total, num_heads, head_size), UNTOUCHED, dtype=dtype)
    lse = torch.full((num_segments, num_heads, total), UNTOUCHED)
    if num_segments == 1:
        out, lse = out[0], lse[0]
    prefix_attention(
        batch.query,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.tail_lens,
        batch.prefix_lens,
        out,
        lse,
        batch.scale,
        max_tail,
    )
    return out, lse


def run_both(
    batch: Batch,
    max_tail: int,
    num_segments: int = 1,
    paged: bool = False,
    prefix_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    prefix_out, prefix_lse = run_prefix(batch, max_tail, num_segments, prefix_dtype)
    out = torch.full_like(batch.query, UNTOUCHED)
    tail_attention(
        batch.query,
        batch.k_cache if paged else batch.key,
        batch.v_cache if paged else batch.value,
        batch.row_masks,
        batch.query_start_loc,
        batch.tail_lens,
        prefix_out,
        prefix_lse,
        out,
        batch.scale,
        max_tail,
        batch.slot_mapping if paged else None,
    )
    return out


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["BHNC", "BNHC", "2BNHC"])
@pytest.mark.parametrize("paged", [False, True], ids=["fresh", "paged"])
def test_mixed_batch(layout: str, paged: bool) -> None:
    batch = make_batch(MIXED, layout=layout, padded_reqs=2, padded_rows=5)
    assert_close(run_both(batch, max_tail=8, paged=paged), expected_output(batch))


@pytest.mark.parametrize(
    "requests",
    [
        [tree(20, 1), tree(0, 1), tree(33, 9), tree(5, 1)],
        [tree(50, 2)],
        [tree(16, 15)],
        [tree(0, 16)],
        [tree(63, 17), tree(64, 17), tree(65, 9)],
        [tree(20, 32), tree(3, 2)],
        [tree(15, 33), tree(100, 20)],
        [tree(31, 64)],
    ],
    ids=lambda requests: "+".join(str(request.tail_len) for request in requests),
)
def test_budgets_around_the_block_size(requests: Sequence[Request]) -> None:
    """Tail lengths at and across tile and mask-word edges; prefixes at and across block edges."""
    max_tail = max(request.tail_len for request in requests)
    num_words = (max_tail + 31) // 32
    batch = make_batch(requests, num_words=num_words)
    assert_close(run_both(batch, max_tail), expected_output(batch))


def test_largest_budget() -> None:
    batch = make_batch([tree(5, 256), tree(9, 200)], num_heads=2, num_kv_heads=1, num_words=8)
    assert_close(run_both(batch, max_tail=256), expected_output(batch))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8])
def test_group_sizes(group: int) -> None:
    """Tree rows of one tile may start or end inside a query group."""
    batch = make_batch([tree(19, 13), chunk(7, 2), tree(8, 6)], num_heads=2 * group)
    assert_close(run_both(batch, max_tail=16), expected_output(batch))


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("layout", ["BHNC", "BNHC"])
def test_head_sizes(head_size: int, layout: str) -> None:
    """K and V lie side by side: reading past a head that is no power of two meets the other."""
    batch = make_batch(
        [tree(21, 10), tree(0, 4)], num_heads=4, num_kv_heads=2, head_size=head_size, layout=layout
    )
    for paged in (False, True):
        assert_close(run_both(batch, max_tail=10, paged=paged), expected_output(batch))


@pytest.mark.parametrize("block_size", [1, 8, 12, 64])
def test_block_sizes(block_size: int) -> None:
    batch = make_batch([tree(37, 6), tree(12, 3)], block_size=block_size)
    for paged in (False, True):
        assert_close(run_both(batch, max_tail=6, paged=paged), expected_output(batch))


@pytest.mark.parametrize("tile_rows", [32, 64, 128])
def test_larger_tiles(tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that large batches get: rows of one tile far past the tail, several mask words."""
    monkeypatch.setattr(tail, "_tile_rows", lambda *_: tile_rows)
    batch = make_batch([tree(19, 40), chunk(7, 2), tree(0, 3)], num_words=2)
    assert_close(run_both(batch, max_tail=40), expected_output(batch))


def test_tiles_grow_with_the_batch() -> None:
    """8 KV heads of 4 query heads of 128, 64 tree rows."""
    assert tail._tile_rows(1 * 8, 64 * 4, 128, 2) == 16
    assert tail._tile_rows(8 * 8, 64 * 4, 128, 2) == 64
    assert tail._tile_rows(32 * 8, 64 * 4, 128, 2) == 128
    assert tail._tile_rows(32 * 8, 64 * 4, 128, 4) == 32


def test_rows_without_a_slot_have_no_key() -> None:
    batch = make_batch([tree(19, 13)])
    without = 4
    batch.slot_mapping[without] = -1
    out = run_both(batch, max_tail=13, paged=True)
    batch.row_masks &= ~(1 << without)
    assert_close(out, expected_output(batch))


@pytest.mark.parametrize("num_segments", [2, 3, 7])
def test_key_segments(num_segments: int) -> None:
    """More segments than the short prefixes fill: some are empty."""
    batch = make_batch([tree(200, 8), tree(0, 8), tree(65, 5), chunk(3, 2)], padded_reqs=1)
    assert_close(run_both(batch, 8, num_segments), expected_output(batch))


def test_many_requests() -> None:
    requests = [tree(3 * i, 2 + i % 15) if i % 3 else chunk(5 * i, 1 + i % 2) for i in range(24)]
    batch = make_batch(requests, num_heads=2, num_kv_heads=1, padded_reqs=3)
    assert_close(run_both(batch, max_tail=16), expected_output(batch))


def test_prefix_output_and_log_sum_exp() -> None:
    batch = make_batch(MIXED, padded_reqs=1, padded_rows=3)
    out, lse = run_prefix(batch, max_tail=8, num_segments=1, dtype=torch.float32)
    starts, group = batch.query_start_loc.tolist(), 2
    for req, (tail_len, prefix_len) in enumerate(
        zip(batch.tail_lens.tolist(), batch.prefix_lens.tolist(), strict=True)
    ):
        rows = slice(starts[req + 1] - tail_len, starts[req + 1])
        query = batch.query[rows].double()
        keys = gather_cache(batch.k_cache, batch.block_table[req], prefix_len).double()
        values = gather_cache(batch.v_cache, batch.block_table[req], prefix_len).double()
        mask = torch.ones(tail_len, prefix_len, dtype=torch.bool)
        assert_close(out[rows], masked_attention(query, keys, values, mask, batch.scale))
        scores = torch.einsum("nhd,mhd->hnm", query, keys.repeat_interleave(group, 1))
        assert_close(lse[:, rows], (scores * batch.scale).logsumexp(-1))
    assert (out[~batch.tree_rows] == UNTOUCHED).all()
    assert (lse[:, ~batch.tree_rows] == UNTOUCHED).all()


def test_empty_prefix_is_zero_with_lse_minus_infinity() -> None:
    batch = make_batch([tree(0, 6)])
    out, lse = run_prefix(batch, max_tail=6, num_segments=1, dtype=torch.float32)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("mark", [float("-inf"), float("inf")])
def test_output_of_an_empty_prefix_is_not_read(mark: float) -> None:
    """FlashAttention 2 marks an empty prefix with +inf, and may leave its output unwritten."""
    batch = make_batch([tree(0, 6)])
    out = torch.empty_like(batch.query)
    tail_attention(
        batch.query,
        batch.key,
        batch.value,
        batch.row_masks,
        batch.query_start_loc,
        batch.tail_lens,
        torch.full_like(batch.query, float("nan")),
        torch.full((batch.query.shape[1], 6), mark),
        out,
        batch.scale,
        6,
    )
    assert_close(out, expected_output(batch))


def test_prefix_output_may_be_the_output() -> None:
    """With another layout of the log-sum-exp, as a kernel that pads its rows returns it."""
    batch = make_batch(MIXED, padded_rows=3)
    prefix_out, lse = run_prefix(batch, max_tail=8, num_segments=1, dtype=torch.float32)
    wide = torch.full((lse.shape[1] + 5, lse.shape[0]), float("nan"))
    wide[: lse.shape[1]] = lse.T
    tail_attention(
        batch.query,
        batch.key,
        batch.value,
        batch.row_masks,
        batch.query_start_loc,
        batch.tail_lens,
        prefix_out,
        wide.T,
        prefix_out,
        batch.scale,
        8,
    )
    assert_close(prefix_out, expected_output(batch))


def test_strided_rows() -> None:
    """Query, key and value as slices of one projection's output."""
    batch = make_batch(MIXED)
    total, head_size = batch.query.shape[0], batch.query.shape[2]
    packed = torch.cat([t.reshape(total, -1) for t in (batch.query, batch.key, batch.value)], 1)
    query, key, value = packed.split([4 * head_size, 2 * head_size, 2 * head_size], dim=1)
    expected = expected_output(batch)
    batch.query = query.unflatten(1, (4, head_size))
    batch.key = key.unflatten(1, (2, head_size))
    batch.value = value.unflatten(1, (2, head_size))
    assert not batch.key.is_contiguous()
    assert_close(run_both(batch, max_tail=8), expected)


@pytest.fixture
def bfloat16_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teach Triton's interpreter, which would multiply the bit patterns, bfloat16 products."""
    original = interpreter.InterpreterBuilder.create_dot

    def widen(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = np.ascontiguousarray(x.data).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return original(self, widen(a), widen(b), *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("paged", [False, True], ids=["fresh", "paged"])
@pytest.mark.parametrize(
    ("requests", "max_tail"), [(MIXED, 8), ([tree(70, 64), tree(0, 9)], 64)], ids=["mixed", "tall"]
)
@pytest.mark.usefixtures("bfloat16_dots")
def test_half_precision(
    dtype: torch.dtype, paged: bool, requests: Sequence[Request], max_tail: int
) -> None:
    """Scores and sums are float32; softmax weights and the output are rounded to ``dtype``.

    Against float64 on the same inputs that leaves two roundings of at most one unit in the last
    place (the interpreter truncates to bfloat16): that of the weights, relative to the largest
    value a row can mix, and that of the output.
    """
    batch = make_batch(requests, head_size=64, num_words=2, dtype=dtype)
    out = run_both(batch, max_tail, num_segments=2, paged=paged)
    unit = torch.finfo(dtype).eps
    largest = float(torch.nan_to_num(batch.v_cache).abs().max())
    expected = expected_output(batch)
    torch.testing.assert_close(out.double(), expected, rtol=unit, atol=unit * largest)


@pytest.mark.parametrize("paged", [False, True], ids=["fresh", "paged"])
def test_block_offsets_beyond_32_bits(paged: bool) -> None:
    """Block 2 of a cache with 2**30 elements a block starts at element 2**31.

    Only the pages of that block are ever touched, so the cache costs address space alone.
    """
    batch = make_batch(
        [tree(20, 4)], num_heads=1, num_kv_heads=1, block_size=32, dtype=torch.float16
    )
    expected = expected_output(batch)
    old, new, size = int(batch.block_table[0, 0]), 2, batch.k_cache[0].numel()
    storage = torch.empty(new * 2**30 + 2 * size, dtype=torch.float16)
    shape, strides = (new + 1, *batch.k_cache.shape[1:]), (2**30, 32, 32, 1)
    for name, offset in (("k_cache", 0), ("v_cache", size)):
        far = storage.as_strided(shape, strides, offset)
        far[new] = getattr(batch, name)[old]
        setattr(batch, name, far)
    batch.block_table[0, 0] = new
    batch.slot_mapping += (new - old) * 32
    unit = torch.finfo(torch.float16).eps
    out = run_both(batch, max_tail=4, paged=paged)
    torch.testing.assert_close(out.double(), expected, rtol=unit, atol=4 * unit)


def test_mask_that_is_too_narrow_is_refused() -> None:
    batch = make_batch([tree(4, 8)], num_words=1)
    prefix_out, prefix_lse = run_prefix(batch, 33, 1, torch.float32)
    with pytest.raises(ValueError, match="mask words"):
        tail_attention(
            batch.query,
            batch.key,
            batch.value,
            batch.row_masks,
            batch.query_start_loc,
            batch.tail_lens,
            prefix_out,
            prefix_lse,
            torch.empty_like(batch.query),
            batch.scale,
            33,
        )


def test_mismatched_dtypes_are_refused() -> None:
    batch = make_batch([tree(4, 8)])
    batch.k_cache = batch.k_cache.half()
    with pytest.raises(ValueError, match="agree"):
        run_prefix(batch, 8, 1, torch.float32)
    batch.key = batch.key.half()
    with pytest.raises(ValueError, match="agree"):
        tail_attention(
            batch.query,
            batch.key,
            batch.value,
            batch.row_masks,
            batch.query_start_loc,
            batch.tail_lens,
            batch.query,
            torch.empty(4, 8),
            torch.empty_like(batch.query),
            batch.scale,
            8,
        )


@pytest.mark.parametrize(
    ("num_reqs", "max_tail", "expected"),
    [(1, 16, 16), (4, 16, 8), (1, 64, 8), (8, 32, 2), (64, 32, 1)],
)
def test_segments_fill_the_gpu_once(num_reqs: int, max_tail: int, expected: int) -> None:
    """8 KV heads of 4 query heads, 132 multiprocessors."""
    assert choose_num_segments(num_reqs, 8, max_tail, 4, num_sms=132) == expected
