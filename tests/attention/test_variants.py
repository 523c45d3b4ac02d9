# SPDX-License-Identifier: Apache-2.0
"""Sliding windows, soft-caps and sinks in the two Triton passes give what the reference gives."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from vllm_ddtree.attention.forward.triton_prefix import window_segments
from vllm_ddtree.attention.kernels import tail
from vllm_ddtree.attention.kernels.prefix import prefix_attention
from vllm_ddtree.attention.kernels.reference import (
    gather_cache,
    masked_attention,
    request_mask,
)
from vllm_ddtree.attention.kernels.tail import tail_attention
from vllm_ddtree.attention.layer import variant_of

from .tree_cases import Batch, Request, chunk, make_batch, reference_output, tree

UNTOUCHED = 77.0
MIXED = [chunk(30, 5), tree(37, 8), chunk(40, 1), tree(0, 5, before=3), tree(16, 8), tree(0, 4)]
# Shorter than a branch, than a tree, than a prefix; longer than all of it.
WINDOWS = [1, 2, 5, 8, 16, 17, 33, 500]


def expected_output(
    batch: Batch, window: int, soft_cap: float = 0.0, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """float64 output for tree rows, UNTOUCHED elsewhere."""
    out = reference_output(batch, window, soft_cap, sinks)
    out[~batch.tree_rows] = UNTOUCHED
    return out


def run_prefix(
    batch: Batch, max_tail: int, window: int, soft_cap: float = 0.0, num_segments: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    total, num_heads, head_size = batch.query.shape
    out = torch.full((num_segments, total, num_heads, head_size), UNTOUCHED)
    lse = torch.full((num_segments, num_heads, total), UNTOUCHED)
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
        batch.positions,
        window,
        soft_cap,
    )
    return out, lse


def run_both(
    batch: Batch,
    max_tail: int,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    num_segments: int = 1,
    paged: bool = False,
) -> torch.Tensor:
    prefix_out, prefix_lse = run_prefix(batch, max_tail, window, soft_cap, num_segments)
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
        positions=batch.positions,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    return out


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("paged", [False, True], ids=["fresh", "paged"])
def test_windows_in_a_mixed_batch(window: int, paged: bool) -> None:
    batch = make_batch(MIXED, window=window, padded_reqs=2, padded_rows=5)
    assert_close(run_both(batch, 8, window, paged=paged), expected_output(batch, window))


@pytest.mark.parametrize("window", [3, 15, 16, 40])
@pytest.mark.parametrize(
    "requests",
    [
        [tree(50, 2)],
        [tree(63, 17), tree(64, 17), tree(65, 9)],
        [tree(15, 33), tree(100, 20)],
        [tree(31, 64)],
    ],
    ids=lambda requests: "+".join(str(request.tail_len) for request in requests),
)
def test_windows_and_budgets(requests: Sequence[Request], window: int) -> None:
    """Tail lengths on both sides of a draft block of 16, prefixes at and across block edges."""
    max_tail = max(request.tail_len for request in requests)
    batch = make_batch(requests, num_words=(max_tail + 31) // 32, window=window)
    assert_close(run_both(batch, max_tail, window), expected_output(batch, window))


@pytest.mark.parametrize("window", [5, 100, 150])
@pytest.mark.parametrize("num_segments", [2, 7])
def test_windows_in_segments(window: int, num_segments: int) -> None:
    """Segments divide the window, not the prefix."""
    batch = make_batch(
        [tree(200, 8), tree(0, 8), tree(65, 5), chunk(3, 2)], window=window, padded_reqs=1
    )
    out = run_both(batch, 8, window, num_segments=num_segments)
    assert_close(out, expected_output(batch, window))


@pytest.mark.parametrize("tile_rows", [32, 128])
def test_windows_in_larger_tiles(tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "_tile_rows", lambda *_: tile_rows)
    batch = make_batch([tree(19, 40), chunk(7, 2), tree(0, 3)], num_words=2, window=6)
    assert_close(run_both(batch, 40, 6), expected_output(batch, 6))


def test_a_window_that_hides_the_prefix_from_deep_rows() -> None:
    """Each row's own part of the prefix, and lse -inf with out 0 where there is none."""
    window = 4
    batch = make_batch([tree(70, 30)], window=window)
    out, lse = run_prefix(batch, 30, window)
    mask = request_mask(30, 100, 30, batch.row_masks, window)[:, 70 - window + 1 : 70]
    query = batch.query.double()
    keys = gather_cache(batch.k_cache, batch.block_table[0], 70, 70 - window + 1).double()
    values = gather_cache(batch.v_cache, batch.block_table[0], 70, 70 - window + 1).double()
    assert_close(out[0], masked_attention(query, keys, values, mask, batch.scale))
    scores = torch.einsum("nhd,mhd->hnm", query, keys.repeat_interleave(2, 1)) * batch.scale
    expected = scores.masked_fill(~mask, float("-inf")).logsumexp(-1)
    assert_close(lse[0], expected)
    nothing = batch.positions - 70 >= window - 1
    assert 0 < int(nothing.sum()) < 30
    assert torch.isneginf(lse[0][:, nothing]).all() and (out[0][nothing] == 0).all()


def test_a_window_longer_than_every_branch_needs_no_tail_window() -> None:
    batch = make_batch(MIXED, window=16)
    prefix_out, prefix_lse = run_prefix(batch, 8, 16)
    out = torch.full_like(batch.query, UNTOUCHED)
    tail_attention(
        batch.query,
        batch.key,
        batch.value,
        batch.row_masks,
        batch.query_start_loc,
        batch.tail_lens,
        prefix_out,
        prefix_lse,
        out,
        batch.scale,
        8,
    )
    assert_close(out, expected_output(batch, 16))


@pytest.mark.parametrize("soft_cap", [0.2, 2.0, 50.0])
@pytest.mark.parametrize("window", [0, 5, 17])
def test_soft_caps(soft_cap: float, window: int) -> None:
    batch = make_batch(MIXED, window=window, padded_rows=2)
    batch.query *= 4
    out = run_both(batch, 8, window, soft_cap, num_segments=2)
    assert_close(out, expected_output(batch, window, soft_cap))


def test_a_soft_cap_far_below_the_scores() -> None:
    """Scores of thousands: the exponentials of tanh must not overflow."""
    batch = make_batch(MIXED)
    batch.query *= 1e4
    out = run_both(batch, 8, soft_cap=5.0)
    assert torch.isfinite(out[batch.tree_rows]).all()
    assert_close(out, expected_output(batch, 0, 5.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_segments", [1, 3])
def test_sinks_count_once(num_segments: int, dtype: torch.dtype) -> None:
    """Large, small and absent sinks; over prefixes, several segments of them and none."""
    batch = make_batch(MIXED, padded_reqs=1)
    sinks = torch.tensor([-2.0, 0.5, 6.0, float("-inf")], dtype=dtype)
    out = run_both(batch, 8, sinks=sinks, num_segments=num_segments)
    assert_close(out, expected_output(batch, 0, sinks=sinks.double()))


def test_random_shapes() -> None:
    """Everything at once, over random batches."""
    rng = np.random.default_rng(0)
    for seed in range(12):
        max_tail = int(rng.choice([4, 12, 20, 34]))
        group, num_kv_heads = int(rng.choice([1, 3, 4])), int(rng.choice([1, 2]))
        window = int(rng.choice([0, 1, 4, 11, 30, 90]))
        requests = [
            tree(int(rng.integers(0, 90)), int(rng.integers(2, max_tail + 1)), before)
            if rng.random() < 0.7
            else chunk(int(rng.integers(0, 60)), int(rng.integers(1, 6)))
            for before in rng.integers(0, 3, size=rng.integers(1, 6)).tolist()
        ]
        batch = make_batch(
            requests,
            num_heads=group * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_size=int(rng.choice([16, 24, 64])),
            block_size=int(rng.choice([8, 16, 32])),
            num_words=2,
            padded_reqs=int(rng.integers(0, 3)),
            padded_rows=int(rng.integers(0, 9)),
            max_depth=int(rng.choice([3, 15])),
            window=window,
            seed=seed,
        )
        soft_cap = float(rng.choice([0.0, 1.5]))
        sinks = torch.randn(group * num_kv_heads) if rng.random() < 0.5 else None
        out = run_both(
            batch,
            max_tail,
            window,
            soft_cap,
            sinks,
            num_segments=int(rng.choice([1, 4])),
            paged=bool(rng.random() < 0.5),
        )
        assert_close(out, expected_output(batch, window, soft_cap, sinks))


def test_a_window_without_positions_is_refused() -> None:
    batch = make_batch([tree(4, 8)])
    positions, batch.positions = batch.positions, None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="positions"):
        run_prefix(batch, 8, window=3)
    batch.positions = positions
    prefix_out, prefix_lse = run_prefix(batch, 8, window=3)
    with pytest.raises(ValueError, match="positions"):
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
            8,
            window=3,
        )


def test_the_variant_of_a_layer() -> None:
    class Impl:
        logits_soft_cap: float | None = None

    class Layer:
        sliding_window: int | None = None
        impl = Impl()

    layer = Layer()
    assert variant_of(layer, depth=7) == variant_of(layer, depth=15)
    assert (variant_of(layer, 7).window, variant_of(layer, 7).soft_cap) == (0, 0.0)
    layer.sliding_window, layer.impl.logits_soft_cap = 7, 30
    # A row of depth 7 and the root are 7 positions apart: the root is out of its window of 7.
    assert variant_of(layer, depth=7).tail_window == 7
    assert variant_of(layer, depth=6).tail_window == 0
    assert (variant_of(layer, 6).window, variant_of(layer, 6).soft_cap) == (7, 30.0)


@pytest.mark.parametrize(
    ("window", "expected"), [(1, 1), (128, 1), (129, 2), (1024, 8), (4096, 16)]
)
def test_segments_of_a_window(window: int, expected: int) -> None:
    assert window_segments(window) == expected
