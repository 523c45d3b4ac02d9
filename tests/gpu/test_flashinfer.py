# SPDX-License-Identifier: Apache-2.0
"""Prefixes by FlashInfer's own kernel, cut into segments on the device, are what the reference
gives."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.attention.tree_cases import backend_metadata, make_batch, reference_output, tree
from tests.gpu.forward import assert_forward
from vllm_ddtree.attention.kernels.reference import gather_cache
from vllm_ddtree.attention.layer import Variant

pytest.importorskip("flashinfer")

UNIT = torch.finfo(torch.bfloat16).eps


def make_plans(
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
    max_num_reqs: int,
    max_pages: int,
    soft_cap: float = 0.0,
) -> Any:
    """Plans without an engine, for heads of 128."""
    from vllm_ddtree.attention.backends.flashinfer_prefix import PrefixPlans

    builder = SimpleNamespace(
        num_qo_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        page_size=page_size,
        sm_scale=128**-0.5,
        logits_soft_cap=soft_cap,
        device=torch.device("cuda", torch.cuda.current_device()),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    return PrefixPlans(builder, max_num_reqs, max_pages)


def step(lens: torch.Tensor, in_graph: bool) -> Any:
    """The tree part of a step's metadata, as `PrefixPlans.prepare` reads it."""
    return SimpleNamespace(prefix_lens=lens, in_graph=in_graph)


def assert_attends(
    out: torch.Tensor,  # [P, R * length, Hq, Dh]
    lse: torch.Tensor,  # [P, Hq, R * length]
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lens: list[int],
) -> None:
    """The segments together are attention to the first keys, as float64 has it."""
    assert not torch.isnan(out).any() and not torch.isnan(lse).any()
    length, group = query.shape[0] // len(lens), query.shape[1] // keys.shape[2]
    merged_lse = lse.double().logsumexp(0)
    merged = (out.double() * (lse.double() - merged_lse).exp().nan_to_num(0.0).mT[..., None]).sum(0)
    for req, num_keys in enumerate(lens):
        rows = slice(req * length, (req + 1) * length)
        if num_keys == 0:
            assert (lse[..., rows] == -torch.inf).all() and (out[:, rows] == 0).all()
            continue
        k, v = (
            gather_cache(cache, table[req], num_keys).double().repeat_interleave(group, dim=1)
            for cache in (keys, values)
        )
        scores = torch.einsum("nhd,mhd->hnm", query[rows].double(), k) * 128**-0.5
        expected = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)
        largest = float(v.abs().max())
        # Softmax weights and the segments' output are bfloat16.
        torch.testing.assert_close(merged[rows], expected, rtol=UNIT, atol=2 * UNIT * largest)
        torch.testing.assert_close(merged_lse[:, rows], scores.logsumexp(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", [2, 9, 33, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (4, 1)])
@pytest.mark.parametrize("heads_inside", [False, True], ids=["NHD", "HND"])
def test_a_graph_for_every_length(
    heads_inside: bool, num_heads: int, num_kv_heads: int, length: int
) -> None:
    """Planned and captured once, replayed with other prefixes in other blocks.

    The host never learns a length; segments come and go.
    """
    torch.manual_seed(0)
    num_reqs, page_size, max_pages = 3, 16, 300
    shape = (num_reqs * max_pages, page_size, num_kv_heads, 2 * 128)
    cache = torch.randn(shape, dtype=torch.bfloat16)
    if heads_inside:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    keys, values = cache.split(128, dim=-1)
    query = torch.randn(num_reqs * length, num_heads, 128, dtype=torch.bfloat16)
    output = torch.empty_like(query)
    table = torch.zeros(num_reqs, max_pages, dtype=torch.int32)
    lens = torch.zeros(num_reqs, dtype=torch.int32)
    plans = make_plans(num_heads, num_kv_heads, page_size, 8, max_pages)
    plan = plans.prepare(step(lens, in_graph=True), length, table)
    assert plan.segments > 1
    plan.run(query, keys, values, output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = plan.run(query, keys, values, output)
    for prefixes in ([4800, 1, 0], [0, 63, 65], [0, 0, 0], [1023, 17, 4799]):
        blocks = torch.randperm(num_reqs * max_pages, dtype=torch.int32)
        table.copy_(blocks.view(num_reqs, max_pages))
        lens.copy_(torch.tensor(prefixes, dtype=torch.int32))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        assert plans.prepare(step(lens, in_graph=False), length, table) is plan
        graph.replay()
        assert_attends(out, lse, query, keys, values, table, prefixes)


def test_many_requests_in_one_segment() -> None:
    torch.manual_seed(0)
    num_reqs, length, page_size, max_pages = 64, 16, 64, 10
    cache = torch.randn(num_reqs * max_pages, page_size, 8, 2 * 128, dtype=torch.bfloat16)
    keys, values = cache.split(128, dim=-1)
    query = torch.randn(num_reqs * length, 32, 128, dtype=torch.bfloat16)
    table = torch.randperm(num_reqs * max_pages, dtype=torch.int32).view(num_reqs, max_pages)
    prefixes = [(37 * i) % (page_size * max_pages) for i in range(num_reqs)]
    lens = torch.tensor(prefixes, dtype=torch.int32)
    plan = make_plans(32, 8, page_size, 64, max_pages).prepare(step(lens, False), length, table)
    assert plan.segments == 1
    out, lse = plan.run(query, keys, values, torch.empty_like(query))
    assert_attends(out, lse, query, keys, values, table, prefixes)


REQUESTS = [tree(200, 32), tree(0, 32), tree(37, 32), tree(640, 32)]


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_trees(in_graph: bool, soft_cap: float, with_sinks: bool) -> None:
    """A layer of trees against float64 on the same bfloat16 inputs; see `test_flash.py`."""
    from vllm_ddtree.attention.backends.flashinfer import TreeFlashInferImpl

    batch = make_batch(REQUESTS, num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    sinks = torch.linspace(-1, 4, 8) if with_sinks else None
    impl: Any = TreeFlashInferImpl.__new__(TreeFlashInferImpl)
    impl.num_heads, impl.num_kv_heads, impl.num_queries_per_kv = 8, 2, 4
    impl.head_size, impl.scale, impl.sinks = 128, batch.scale, sinks
    impl.kv_cache_dtype = "auto"
    impl.tree_variant = Variant(soft_cap=soft_cap)
    metadata = backend_metadata(batch, 32, has_plain_rows=False, in_graph=in_graph)
    plans = make_plans(8, 2, 16, 8, batch.block_table.shape[1], soft_cap)
    metadata.prefix = plans.prepare(metadata.tree, 32, batch.block_table)
    assert metadata.prefix.segments > 1
    expected = reference_output(batch, soft_cap=soft_cap, sinks=sinks)
    assert_forward(impl, batch, metadata, expected, in_graph)
