# SPDX-License-Identifier: Apache-2.0
"""With fp8 caches the kernels, their composition and FlashAttention's scales give what the
reference gives on the numbers that the bytes stand for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import fa_utils

from vllm_ddtree.attention.backends.flash_attn import TreeFlashAttentionImpl
from vllm_ddtree.attention.backends.triton_attn import TreeTritonAttentionImpl
from vllm_ddtree.attention.backends.triton_mla import TreeTritonMLAImpl
from vllm_ddtree.attention.kernels.prefix import prefix_attention
from vllm_ddtree.attention.kernels.reference import (
    gather_cache,
    latent_attention_reference,
    masked_attention,
)
from vllm_ddtree.attention.kernels.scales import Scales, check_latent_dtypes
from vllm_ddtree.attention.kernels.tail import tail_attention
from vllm_ddtree.attention.layer import Variant, scales_of
from vllm_ddtree.attention.metadata.latent import Tail

from .fp8_cases import FP8, PER_HEAD, PER_TENSOR, layer_of, quantise, round_to_fp8
from .tree_cases import (
    Batch,
    backend_metadata,
    chunk,
    make_batch,
    reference_output,
    tree,
)

UNTOUCHED = 77.0
PLAIN = Variant()
MIXED = [chunk(30, 5), tree(37, 8), chunk(40, 1), tree(0, 5, before=3), tree(16, 8)]
TREES = [tree(37, 8), tree(0, 5), tree(90, 8)]
ROUNDING: dict[torch.dtype, Any] = {
    # Against float64 on the same numbers: sums in float32; or weights and output in 16 bits.
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 8e-3},
}


def expected_output(
    exact: Batch, variant: Variant = PLAIN, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """float64 output for tree rows, UNTOUCHED elsewhere."""
    out = reference_output(exact, variant.window, variant.soft_cap, sinks)
    out[~exact.tree_rows] = UNTOUCHED
    return out


def run_kernels(
    stored: Batch,
    scales: Scales,
    num_segments: int = 1,
    variant: Variant = PLAIN,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    total, num_heads, head_size = stored.query.shape
    prefix_out = torch.full((num_segments, total, num_heads, head_size), UNTOUCHED)
    prefix_lse = torch.full((num_segments, num_heads, total), UNTOUCHED)
    prefix_attention(
        stored.query,
        stored.k_cache,
        stored.v_cache,
        stored.block_table,
        stored.query_start_loc,
        stored.tail_lens,
        stored.prefix_lens,
        prefix_out,
        prefix_lse,
        stored.scale,
        8,
        stored.positions,
        variant.window,
        variant.soft_cap,
        scales,
    )
    out = torch.full((total, num_heads, head_size), UNTOUCHED, dtype=scales.dtype)
    tail_attention(
        stored.query,
        stored.k_cache,
        stored.v_cache,
        stored.row_masks,
        stored.query_start_loc,
        stored.tail_lens,
        prefix_out,
        prefix_lse,
        out,
        stored.scale,
        8,
        stored.slot_mapping,
        positions=stored.positions,
        window=variant.tail_window,
        soft_cap=variant.soft_cap,
        sinks=sinks,
        scales=scales,
    )
    return out


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("fp8_query", [True, False], ids=["fp8 query", "query as it is"])
@pytest.mark.parametrize("given", [PER_TENSOR, PER_HEAD], ids=["per tensor", "per head"])
@pytest.mark.parametrize("num_segments", [1, 3])
def test_kernels(
    dtype: torch.dtype, fp8_query: bool, given: tuple[torch.Tensor, ...], num_segments: int
) -> None:
    batch = make_batch(MIXED, padded_reqs=1, padded_rows=3, dtype=dtype)
    stored, exact, scales = quantise(batch, given, fp8_query)
    out = run_kernels(stored, scales, num_segments)
    torch.testing.assert_close(out.double(), expected_output(exact), **ROUNDING[dtype])


@pytest.mark.parametrize("window", [5, 20])
def test_kernels_with_window_soft_cap_and_sinks(window: int) -> None:
    """The scales come before the cap, and leave the sinks alone."""
    variant = Variant(window, window if window <= 15 else 0, soft_cap=1.5)
    sinks = torch.linspace(-1, 2, 4)
    stored, exact, scales = quantise(make_batch(MIXED, window=window), PER_HEAD)
    out = run_kernels(stored, scales, 2, variant, sinks)
    expected = expected_output(exact, variant, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_every_fp8_number() -> None:
    """Subnormal, largest and negative ones: with one key a row's output is that key's value."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(FP8).float().isfinite()][:252].reshape(9, 1, 28)
    batch = make_batch([tree(0, 1)] * 9, num_heads=1, num_kv_heads=1, head_size=28)
    stored, _, scales = quantise(batch, PER_TENSOR)
    stored.v_cache.view(torch.uint8)[stored.block_table[:, 0].long(), 0] = codes
    out = run_kernels(stored, scales)
    torch.testing.assert_close(out, codes.view(FP8).float() * PER_TENSOR[2].to(out.device))


def impl_of(kind: Any, batch: Batch, variant: Variant = PLAIN) -> Any:
    impl = kind.__new__(kind)
    impl.num_heads, impl.head_size = batch.query.shape[1:]
    impl.num_kv_heads = batch.key.shape[1]
    impl.num_queries_per_kv = impl.num_heads // impl.num_kv_heads
    impl.scale, impl.sinks, impl.tree_variant = batch.scale, None, variant
    impl.kv_cache_dtype, impl.vllm_flash_attn_version = "fp8", 3
    return impl


def forward(impl: Any, stored: Batch, scales: Scales, fresh: bool) -> torch.Tensor:
    """As vLLM calls it: the cache in bytes, key and value as they were before they were stored."""
    # [num_blocks, Hkv, block_size, K | V]
    cache = torch.cat([stored.k_cache.view(torch.uint8), stored.v_cache.view(torch.uint8)], dim=-1)
    key, value = (stored.key, stored.value) if fresh else (None, None)
    output = torch.full(stored.query.shape, UNTOUCHED, dtype=scales.dtype)
    metadata = backend_metadata(stored, 8, has_plain_rows=False)
    impl.forward(
        layer_of(scales), stored.query, key, value, cache.transpose(1, 2), metadata, output
    )
    return output


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "paged"])
def test_triton_forward_reads_the_rounded_rows(fresh: bool) -> None:
    """Rounded by scales this coarse, this step's own rows would give another output."""
    stored, exact, scales = quantise(make_batch(TREES), PER_TENSOR)
    output = forward(impl_of(TreeTritonAttentionImpl, stored), stored, scales, fresh)
    expected = expected_output(exact)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


class FlashAttention:
    """Stands for vLLM's function of this name: what its scales mean, in PyTorch."""

    def __init__(self, out_dtype: torch.dtype) -> None:
        self.out_dtype, self.calls = out_dtype, 0

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        softmax_scale: float,
        block_table: torch.Tensor,
        causal: bool,
        return_softmax_lse: bool,
        k_descale: torch.Tensor,
        v_descale: torch.Tensor,
        q_descale: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        assert k.dtype == v.dtype == FP8 and out.dtype == self.out_dtype
        assert (q.dtype == FP8) == (q_descale is not None)
        assert return_softmax_lse and not causal
        group = q.shape[1] // k.shape[2]
        lse = torch.full((q.shape[1], q.shape[0]), float("-inf"))
        starts = cu_seqlens_q.tolist()
        for req, length in enumerate(seqused_k.tolist()):
            rows = slice(starts[req], starts[req + 1])
            query = q[rows].double()
            if q_descale is not None:
                query = query * q_descale[req].repeat_interleave(group)[:, None]
            keys = gather_cache(k, block_table[req], length).double() * k_descale[req][:, None]
            values = gather_cache(v, block_table[req], length).double() * v_descale[req][:, None]
            mask = torch.ones(query.shape[0], length, dtype=torch.bool)
            scores = torch.einsum("nhd,mhd->hnm", query, keys.repeat_interleave(group, 1))
            out[rows] = masked_attention(query, keys, values, mask, softmax_scale).to(out.dtype)
            lse[:, rows] = (scores * softmax_scale).logsumexp(-1).float()
        return out, lse


@pytest.mark.parametrize("fp8_query", [True, False], ids=["fp8 query", "query as it is"])
@pytest.mark.parametrize("given", [PER_TENSOR, PER_HEAD], ids=["per tensor", "per head"])
def test_flash_forward(
    given: tuple[torch.Tensor, ...], fp8_query: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = FlashAttention(torch.float32)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", kernel, raising=False)
    stored, exact, scales = quantise(make_batch(TREES), given, fp8_query)
    output = forward(impl_of(TreeFlashAttentionImpl, stored), stored, scales, fresh=True)
    torch.testing.assert_close(output.double(), expected_output(exact), rtol=1e-5, atol=1e-5)
    assert kernel.calls == 1


def test_a_windowed_layer_on_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own kernel reads its prefix."""
    kernel = FlashAttention(torch.float32)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", kernel, raising=False)
    variant = Variant(window=20)
    stored, exact, scales = quantise(make_batch(TREES, window=20), PER_TENSOR)
    output = forward(impl_of(TreeFlashAttentionImpl, stored, variant), stored, scales, fresh=True)
    expected = expected_output(exact, variant)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert kernel.calls == 0


def test_scales_of_a_layer() -> None:
    """vLLM's are of one element or of one a head; an unquantised layer's are not read."""
    impl: Any = SimpleNamespace(kv_cache_dtype="fp8_e4m3", num_kv_heads=2)
    q_scale, k_scale, v_scale = PER_TENSOR[0], PER_TENSOR[1].reshape(1), PER_HEAD[2]
    layer = SimpleNamespace(_q_scale=q_scale, _k_scale=k_scale, _v_scale=v_scale)
    scales = scales_of(impl, layer, torch.float16)
    assert scales is not None and scales.strides() == (0, 0, 1)
    assert [scale.tolist() for scale in scales.tensors()] == [
        [q_scale.item()] * 2,
        [k_scale.item()] * 2,
        v_scale.tolist(),
    ]
    impl.kv_cache_dtype = "auto"
    assert scales_of(impl, layer, torch.float16) is None


def test_what_does_not_fit_is_refused() -> None:
    batch = make_batch([tree(4, 8)])
    stored, _, scales = quantise(batch, PER_TENSOR)
    with pytest.raises(ValueError, match="scales are for fp8"):
        run_kernels(batch, scales)
    with pytest.raises(ValueError, match="scales are for fp8"):
        run_kernels(Batch(**{**vars(stored), "v_cache": batch.v_cache}), scales)
    with pytest.raises(ValueError, match="neither"):
        run_kernels(Batch(**{**vars(stored), "query": batch.query.half()}), scales)


LATENT_SCALE = torch.tensor(0.3)


def latent_outputs(batch: Batch, rank: int, tails: list[Tail]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the implementation over an fp8 cache, and of the reference on what its bytes stand for.

    In the queries' dtype and in float64; UNTOUCHED and 0 where no tail is, as in the first.
    """
    scale = LATENT_SCALE.to(batch.query.device)
    cache = round_to_fp8(batch.k_cache, scale)
    impl: Any = TreeTritonMLAImpl.__new__(TreeTritonMLAImpl)
    impl.kv_lora_rank, impl.scale = rank, batch.scale
    metadata = SimpleNamespace(
        tails=tails,
        decode=SimpleNamespace(block_table=batch.block_table),
        slot_mapping=batch.slot_mapping,
    )
    layer = SimpleNamespace(_k_scale=scale)
    out, _ = impl.forward_mqa(batch.query, cache[:, :, 0], metadata, layer)
    expected = torch.zeros(out.shape, dtype=torch.float64)
    for part in tails:
        latent_attention_reference(
            batch.query.double(),
            cache[:, :, 0].double() * scale,
            rank,
            batch.block_table,
            part.ends,
            part.lens,
            part.prefix_lens,
            part.masks,
            expected,
            batch.scale,
        )
    return out, expected


def latent_tails(batch: Batch) -> list[Tail]:
    """Trees, and the causal rows beside them."""
    starts, ends = batch.query_start_loc[:-1], batch.query_start_loc[1:]
    lens = ends - starts - batch.tail_lens
    plain_ends, before = ends - batch.tail_lens, batch.seq_lens - batch.tail_lens - lens
    return [
        Tail(ends, batch.tail_lens, batch.prefix_lens, 8, batch.row_masks),
        Tail(plain_ends, lens, before, 5, None),
    ]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("num_sms", [1, 80])
def test_latent_caches(dtype: torch.dtype, num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in one segment, and in several."""
    from vllm_ddtree.attention.forward import triton_prefix

    monkeypatch.setattr(triton_prefix, "num_sms", lambda _: num_sms)
    batch = make_batch(MIXED, num_heads=4, num_kv_heads=1, head_size=80, dtype=dtype)
    out, expected = latent_outputs(batch, 64, latent_tails(batch))
    torch.testing.assert_close(out.double(), expected, **ROUNDING[dtype])


@pytest.mark.parametrize(("fp8", "scale"), [(True, None), (False, LATENT_SCALE)])
def test_a_latent_cache_and_its_scale(fp8: bool, scale: torch.Tensor | None) -> None:
    query, rope, cache = torch.zeros(1, 4, 64), torch.zeros(1, 4, 16), torch.zeros(2, 16, 80)
    with pytest.raises(ValueError, match="which needs one"):
        check_latent_dtypes(query, rope, cache.to(FP8) if fp8 else cache, scale)
