# SPDX-License-Identifier: Apache-2.0
"""With fp8 caches the compiled kernels give what the reference gives: our two passes,
FlashAttention's prefix, latent caches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.attention.fp8_cases import PER_HEAD, PER_TENSOR, layer_of, quantise, round_to_fp8
from tests.attention.tree_cases import Batch, backend_metadata, make_batch, reference_output, tree
from tests.gpu.forward import run
from vllm_ddtree.attention.backends.flash_attn import TreeFlashAttentionImpl
from vllm_ddtree.attention.backends.triton_attn import TreeTritonAttentionImpl
from vllm_ddtree.attention.backends.triton_mla import TreeTritonMLAImpl
from vllm_ddtree.attention.kernels.reference import latent_attention_reference
from vllm_ddtree.attention.kernels.scales import Scales
from vllm_ddtree.attention.layer import Variant
from vllm_ddtree.attention.metadata.latent import Tail

if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("fp8 (e4m3) needs compute capability 8.9", allow_module_level=True)

REQUESTS = [tree(200, 32), tree(0, 20), tree(37, 32), tree(640, 5)]
MAX_TAIL, DEPTH = 32, 15
BFLOAT16 = torch.finfo(torch.bfloat16).eps
# Half the step between two numbers of fp8 (e4m3), to the smaller of them.
FP8_ROUNDING = 2.0**-4


def forward(
    kind: Any, stored: Batch, scales: Scales, variant: Variant, sinks: Any, in_graph: bool
) -> torch.Tensor:
    """The implementation as vLLM calls it, in bfloat16: bytes as the cache, key and value as they
    were before they were stored.
    """
    impl = kind.__new__(kind)
    impl.num_heads, impl.head_size = stored.query.shape[1:]
    impl.num_kv_heads = stored.key.shape[1]
    impl.num_queries_per_kv = impl.num_heads // impl.num_kv_heads
    impl.scale, impl.sinks, impl.tree_variant = stored.scale, sinks, variant
    impl.kv_cache_dtype, impl.vllm_flash_attn_version = "fp8", 3
    metadata = backend_metadata(stored, MAX_TAIL, has_plain_rows=False, in_graph=in_graph)
    # [num_blocks, Hkv, block_size, K | V]
    cache = torch.cat([stored.k_cache.view(torch.uint8), stored.v_cache.view(torch.uint8)], dim=-1)
    cache = cache.transpose(1, 2).contiguous()
    output = torch.empty(stored.query.shape, dtype=torch.bfloat16)
    arguments = layer_of(scales), stored.query, stored.key, stored.value, cache, metadata, output
    run(lambda: impl.forward(*arguments), output, in_graph)
    return output


def cases(
    given: tuple[torch.Tensor, ...], window: int = 0, fp8_query: bool = True
) -> tuple[Batch, Batch, Scales]:
    batch = make_batch(
        REQUESTS,
        num_heads=8,
        num_kv_heads=2,
        head_size=128,
        max_depth=DEPTH,
        window=window,
        dtype=torch.bfloat16,
    )
    if not window:
        # FlashAttention may multiply what lies behind the prefix by 0; a cache holds numbers.
        for cache in (batch.k_cache, batch.v_cache):
            cache.nan_to_num_(0.0)
    return quantise(batch, given, fp8_query)


def expected_output(exact: Batch, variant: Variant, sinks: Any) -> torch.Tensor:
    return reference_output(exact, variant.window, variant.soft_cap, sinks)


def largest_value(exact: Batch) -> float:
    return float(torch.nan_to_num(exact.v_cache).abs().max())


@pytest.mark.parametrize("given", [PER_TENSOR, PER_HEAD], ids=["per tensor", "per head"])
@pytest.mark.parametrize("fp8_query", [True, False], ids=["fp8 query", "query as it is"])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (6, 0.0), (128, 3.0)])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_triton(
    given: tuple[torch.Tensor, ...], fp8_query: bool, window: int, soft_cap: float, in_graph: bool
) -> None:
    """Against float64 on the numbers that the bytes stand for.

    Products are exact; softmax weights and the output are rounded to bfloat16.
    """
    stored, exact, scales = cases(given, window, fp8_query)
    variant = Variant(window, window if window <= DEPTH else 0, soft_cap)
    sinks = torch.linspace(-1, 4, 8, dtype=torch.bfloat16) if soft_cap else None
    output = forward(TreeTritonAttentionImpl, stored, scales, variant, sinks, in_graph)
    torch.testing.assert_close(
        output.double(),
        expected_output(exact, variant, sinks),
        rtol=BFLOAT16,
        atol=2 * BFLOAT16 * largest_value(exact),
    )


@pytest.mark.parametrize("given", [PER_TENSOR, PER_HEAD], ids=["per tensor", "per head"])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_flash(given: tuple[torch.Tensor, ...], soft_cap: float, in_graph: bool) -> None:
    """FlashAttention rounds softmax weights to fp8: each value counts wrong by at most that much,
    and as the errors are of either sign, the output as a whole by less.
    """
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version = get_flash_attn_version(head_size=128, requires_softcap=bool(soft_cap))
    if version != 3:
        pytest.skip(f"FlashAttention {version} is chosen here; it is version 3 that reads fp8")
    stored, exact, scales = cases(given)
    variant = Variant(soft_cap=soft_cap)
    output = forward(TreeFlashAttentionImpl, stored, scales, variant, None, in_graph).double()
    expected = expected_output(exact, variant, None)
    torch.testing.assert_close(
        output, expected, rtol=BFLOAT16, atol=1.2 * FP8_ROUNDING * largest_value(exact)
    )
    # By head, as scales may be.
    error = (output - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
    assert float(error.max()) < FP8_ROUNDING


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_windowed_layer_on_flash(in_graph: bool) -> None:
    """Our own kernel reads its prefix, so nothing is rounded to fp8."""
    variant = Variant(window=128)
    stored, exact, scales = cases(PER_TENSOR, window=128)
    output = forward(TreeFlashAttentionImpl, stored, scales, variant, None, in_graph)
    torch.testing.assert_close(
        output.double(),
        expected_output(exact, variant, None),
        rtol=BFLOAT16,
        atol=2 * BFLOAT16 * largest_value(exact),
    )


RANK, ROPE = 512, 64
LATENT_REQUESTS = {
    "one": [tree(3000, 64)],
    "several": [tree(200, 32), tree(0, 20), tree(37, 32), tree(640, 5)],
}


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "chain"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("kind", LATENT_REQUESTS)
def test_latent(kind: str, heads: int, in_graph: bool, causal: bool) -> None:
    """As `test_latent.py`, over bytes and their scale."""
    requests = LATENT_REQUESTS[kind]
    max_tail = max(request.tail_len for request in requests)
    batch = make_batch(
        requests,
        num_heads=heads,
        num_kv_heads=1,
        head_size=RANK + ROPE,
        num_words=(max_tail + 31) // 32,
        padded_reqs=1,
        padded_rows=3,
        dtype=torch.bfloat16,
    )
    scale = torch.tensor(0.3)
    cache = round_to_fp8(batch.k_cache, scale)[:, :, 0]
    exact = cache.double() * scale
    tail = Tail(
        batch.query_start_loc[1:],
        batch.tail_lens,
        batch.prefix_lens,
        max_tail,
        None if causal else batch.row_masks,
    )
    metadata = SimpleNamespace(
        tails=[tail],
        decode=SimpleNamespace(block_table=batch.block_table),
        slot_mapping=batch.slot_mapping,
    )
    impl: Any = TreeTritonMLAImpl.__new__(TreeTritonMLAImpl)
    impl.kv_lora_rank, impl.scale = RANK, batch.scale
    layer = SimpleNamespace(_k_scale=scale)
    parts = tuple(part.contiguous() for part in batch.query.split([RANK, ROPE], dim=-1))

    out, _ = impl.forward_mqa(parts, cache, metadata, layer)
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = impl.forward_mqa(parts, cache, metadata, layer)
        out.fill_(float("nan"))
        graph.replay()
    rows = int(batch.query_start_loc[-1])
    assert not out[rows:].any()
    expected = torch.zeros(*batch.query.shape[:2], RANK, dtype=torch.float64)
    latent_attention_reference(
        batch.query.double(),
        exact,
        RANK,
        batch.block_table,
        tail.ends,
        tail.lens,
        tail.prefix_lens,
        tail.masks,
        expected,
        batch.scale,
    )
    largest = float(torch.nan_to_num(exact).abs().max())
    torch.testing.assert_close(
        out[:rows].double(), expected[:rows], rtol=BFLOAT16, atol=2 * BFLOAT16 * largest
    )
