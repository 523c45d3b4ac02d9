# SPDX-License-Identifier: Apache-2.0
"""Latent (MLA) tree attention: the reference agrees with its expanded form, the kernels agree with
the reference."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from vllm_ddtree.attention.forward import triton_prefix
from vllm_ddtree.attention.forward.latent import latent_attention
from vllm_ddtree.attention.forward.triton_prefix import triton_latent_prefix_pass
from vllm_ddtree.attention.kernels import latent_prefix as latent_prefix_module
from vllm_ddtree.attention.kernels import latent_tail as latent_tail_module
from vllm_ddtree.attention.kernels.latent_prefix import (
    latent_prefix,
    latent_segments,
    num_stages,
    tile_rows,
)
from vllm_ddtree.attention.kernels.latent_tail import latent_tail
from vllm_ddtree.attention.kernels.reference import (
    latent_attention_reference,
    tree_attention_reference,
)
from vllm_ddtree.attention.metadata.latent import Tail

from .tree_cases import Batch, Request, chunk, make_batch, tree

UNTOUCHED = 77.0
MIXED = [chunk(30, 5), tree(37, 8), chunk(40, 1), tree(0, 5, before=3), tree(16, 8), chunk(0, 3)]


def latent_batch(
    requests: Sequence[Request], heads: int = 4, rank: int = 64, rope: int = 16, **given: Any
) -> Batch:
    """`make_batch` over one KV head of rank + rope elements; k_cache is the latent cache."""
    return make_batch(requests, num_heads=heads, num_kv_heads=1, head_size=rank + rope, **given)


def tree_tail(batch: Batch, max_len: int) -> Tail:
    ends = batch.query_start_loc[1:]
    return Tail(ends, batch.tail_lens, batch.prefix_lens, max_len, batch.row_masks)


def plain_tail(batch: Batch, max_len: int) -> Tail:
    """The rows outside trees, causal."""
    starts, ends = batch.query_start_loc[:-1], batch.query_start_loc[1:]
    lens = ends - starts - batch.tail_lens
    return Tail(
        ends - batch.tail_lens, lens, batch.seq_lens - batch.tail_lens - lens, max_len, None
    )


def expected_output(batch: Batch, rank: int, tails: Sequence[Tail]) -> torch.Tensor:
    """float64 output for the tails' rows, UNTOUCHED elsewhere."""
    out = batch.query.new_full((*batch.query.shape[:2], rank), UNTOUCHED, dtype=torch.float64)
    for tail in tails:
        latent_attention_reference(
            batch.query.double(),
            batch.k_cache[:, :, 0].double(),
            rank,
            batch.block_table,
            tail.ends,
            tail.lens,
            tail.prefix_lens,
            tail.masks,
            out,
            batch.scale,
        )
    return out


def run(batch: Batch, rank: int, tails: Sequence[Tail]) -> torch.Tensor:
    out = batch.query.new_full((*batch.query.shape[:2], rank), UNTOUCHED)
    for tail in tails:
        latent_attention(
            batch.query[..., :rank],
            batch.query[..., rank:].contiguous(),
            batch.k_cache[:, :, 0],
            batch.block_table,
            batch.slot_mapping,
            tail,
            out,
            batch.scale,
        )
    return out


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_reference_is_the_expanded_form() -> None:
    """Each head's own keys and values, projected up from the latents, under ordinary attention."""
    heads, nope, rope, rank, width = 3, 12, 8, 20, 10
    batch = latent_batch(MIXED, heads, rank, rope, dtype=torch.float64)
    up_k, up_v = torch.randn(heads, nope, rank).double(), torch.randn(heads, rank, width).double()
    total = batch.query.shape[0]
    q_nope, q_rope = torch.randn(total, heads, nope).double(), torch.randn(total, heads, rope)
    latents, k_rope = batch.k_cache.split([rank, rope], dim=-1)
    keys = torch.cat(
        [
            torch.einsum("bsr,hnr->bshn", latents[:, :, 0], up_k),
            k_rope.expand(-1, -1, heads, -1),
        ],
        dim=-1,
    )
    values = torch.einsum("bsr,hrv->bshv", latents[:, :, 0], up_v)
    expected = tree_attention_reference(
        torch.cat([q_nope, q_rope.double()], dim=-1),
        keys,
        values,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.tail_lens,
        batch.row_masks,
        batch.scale,
    )
    absorbed = torch.einsum("thn,hnr->thr", q_nope, up_k)
    batch.query = torch.cat([absorbed, q_rope.double()], dim=-1)
    out = expected_output(batch, rank, [tree_tail(batch, 8), plain_tail(batch, 5)])
    assert (out != UNTOUCHED).all()
    torch.testing.assert_close(torch.einsum("thr,hrv->thv", out, up_v), expected)


@pytest.mark.parametrize("layout", ["BHNC", "BNHC"])
def test_mixed_batch(layout: str) -> None:
    """Trees beside prefill and decode rows, padded requests and rows; each form its own rows."""
    batch = latent_batch(MIXED, layout=layout, padded_reqs=2, padded_rows=5)
    for tails in (
        [tree_tail(batch, 8)],
        [plain_tail(batch, 5)],
        [tree_tail(batch, 8), plain_tail(batch, 5)],
    ):
        assert_close(run(batch, 64, tails), expected_output(batch, 64, tails))


@pytest.mark.parametrize(
    "requests",
    [
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
    batch = latent_batch(requests, heads=2, num_words=(max_tail + 31) // 32)
    tails = [tree_tail(batch, max_tail)]
    assert_close(run(batch, 64, tails), expected_output(batch, 64, tails))


@pytest.mark.parametrize(
    ("heads", "rank", "rope"),
    [(4, 512, 64), (8, 256, 64), (16, 64, 32), (5, 96, 24), (64, 128, 64), (128, 64, 16)],
)
def test_shapes(heads: int, rank: int, rope: int) -> None:
    """Kimi-K2 on 8 GPUs has 8 heads a GPU, on one 64; DeepSeek-V3 has 128."""
    batch = latent_batch([tree(40, 6), chunk(9, 3), tree(3, 4)], heads, rank, rope, block_size=16)
    tails = [tree_tail(batch, 6), plain_tail(batch, 3)]
    assert_close(run(batch, rank, tails), expected_output(batch, rank, tails))


@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("num_segments", [1, 3, 8])
def test_segments(num_segments: int, block_m: int) -> None:
    """More segments than blocks of keys leave some of them empty, with whatever lay there."""
    batch = latent_batch([tree(150, 9), tree(0, 4), tree(33, 7)], padded_reqs=1)
    total, heads = batch.query.shape[:2]
    prefix_out = torch.full((num_segments, total, heads, 64), float("nan"))
    lse = torch.full((num_segments, heads, total), UNTOUCHED)
    tail = tree_tail(batch, 9)
    query, rope, cache = batch.query[..., :64], batch.query[..., 64:], batch.k_cache[:, :, 0]
    latent_prefix(
        query,
        rope,
        cache,
        batch.block_table,
        tail.ends,
        tail.lens,
        tail.prefix_lens,
        prefix_out,
        lse,
        batch.scale,
        9,
        block_m,
    )
    out = torch.full((total, heads, 64), UNTOUCHED)
    latent_tail(
        query,
        rope,
        cache,
        batch.slot_mapping,
        tail.masks,
        tail.ends,
        tail.lens,
        prefix_out,
        lse,
        out,
        batch.scale,
        len(tail.lens),
        9,
    )
    assert_close(out, expected_output(batch, 64, [tail]))


@pytest.mark.parametrize("tile", [32, 64])
def test_tiles_of_the_tail(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    monkeypatch.setattr(latent_tail_module, "TILE_ROWS", tile)
    batch = latent_batch(MIXED)
    tails = [tree_tail(batch, 8), plain_tail(batch, 5)]
    assert_close(run(batch, 64, tails), expected_output(batch, 64, tails))


def test_many_segments_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose multiprocessors a small batch leaves idle."""
    monkeypatch.setattr(triton_prefix, "num_sms", lambda device: 12)
    batch = latent_batch([tree(150, 9), tree(70, 4)])
    tails = [tree_tail(batch, 9)]
    assert latent_segments(2, 36, 16, 12) == 2
    assert_close(run(batch, 64, tails), expected_output(batch, 64, tails))


@pytest.mark.parametrize("segments", [1, 2])
def test_the_prefix_is_not_rounded(monkeypatch: pytest.MonkeyPatch, segments: int) -> None:
    """It is merged with the tail first, in however many segments it comes."""
    monkeypatch.setattr(triton_prefix, "latent_segments", lambda *_: segments)
    batch = latent_batch([tree(70, 9)])
    query, cache = batch.query.half(), batch.k_cache[:, :, 0].half()

    def prefix(dtype: torch.dtype) -> torch.Tensor:
        latents, rope = query.to(dtype).split([64, 16], dim=-1)
        out, _ = triton_latent_prefix_pass(
            latents, rope, cache.to(dtype), batch.block_table, tree_tail(batch, 9), batch.scale
        )
        return out

    half = prefix(torch.float16)
    assert half.shape == (segments, 9, 4, 64) and half.dtype == torch.float32
    assert (half != half.half()).any()
    torch.testing.assert_close(half, prefix(torch.float32), rtol=5e-3, atol=5e-3)


def test_segments_fill_a_gpu_once() -> None:
    assert latent_segments(1, 128, 64, 132) == 64
    assert latent_segments(1, 512, 64, 132) == 16
    assert latent_segments(64, 512, 64, 132) == 1


def test_tiles_fit_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 576: bfloat16 on an H200, on an A100 and on a GPU with 99 KiB; float32."""
    cache = torch.empty(1, 16, 576, dtype=torch.bfloat16)
    for available, tall, stages in ((232448, 64, 2), (166912, 16, 2), (101376, 16, 1)):
        monkeypatch.setattr(latent_prefix_module, "shared_memory", lambda _, n=available: n)
        assert tile_rows(128, 1152, cache.device) == tall
        assert tile_rows(32, 1152, cache.device) == 16
        assert num_stages(tall, cache) == stages
        assert tile_rows(128, 2304, cache.device) == 16
        assert num_stages(16, cache.float()) == 1


def test_a_random_sweep() -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator, device="cpu"))

    for seed in range(6):
        requests = [
            tree(draw(0, 90), draw(2, 20), before=draw(0, 1) * draw(1, 4))
            if draw(0, 2)
            else chunk(draw(0, 60), draw(1, 12))
            for _ in range(draw(1, 5))
        ]
        heads, rank, rope = draw(1, 9), 16 * draw(1, 6), 8 * draw(1, 4)
        batch = latent_batch(
            requests, heads, rank, rope, padded_reqs=draw(0, 2), padded_rows=draw(0, 3), seed=seed
        )
        tails = [tree_tail(batch, 20), plain_tail(batch, 12)]
        assert_close(run(batch, rank, tails), expected_output(batch, rank, tails))


def test_rows_without_a_slot_have_no_key() -> None:
    """The root's key is taken away: its own row sees the prefix alone."""
    batch = latent_batch([tree(20, 5)])
    whole = run(batch, 64, [tree_tail(batch, 5)])
    batch.slot_mapping[0] = -1
    without = run(batch, 64, [tree_tail(batch, 5)])
    batch.tail_lens[:] = 0
    assert not torch.equal(whole, without)
    prefix_only = Tail(
        batch.query_start_loc[1:] * 0 + 1,
        batch.tail_lens + 1,
        batch.prefix_lens - 1,
        1,
        None,
    )
    # One key fewer in front and the root's slot on the last of them: the same 20 keys.
    block = batch.block_table[0, 19 // 16]
    batch.slot_mapping[0] = block * 16 + 19 % 16
    assert_close(without[0], run(batch, 64, [prefix_only])[0].double())


def test_what_does_not_fit_is_refused() -> None:
    batch = latent_batch([tree(20, 5)])
    with pytest.raises(ValueError, match="2 mask words, got 1"):
        run(batch, 64, [tree_tail(batch, 33)])
    batch = latent_batch([tree(20, 5)])
    batch.k_cache = batch.k_cache.half()
    with pytest.raises(ValueError, match="must agree"):
        run(batch, 64, [tree_tail(batch, 5)])
