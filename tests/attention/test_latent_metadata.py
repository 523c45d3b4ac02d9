# SPDX-License-Identifier: Apache-2.0
"""The right rows of a batch go to the latent kernels, and each row gets what the reference gives:
the builders over vLLM's own, and the backends' implementations. FlashAttention's and FlashMLA's
kernels are stand-ins."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backends.mla import triton_mla

from vllm_ddtree.attention.backends.triton_mla import TreeTritonMLAImpl
from vllm_ddtree.attention.kernels.reference import tree_attention_reference
from vllm_ddtree.attention.registry import supported

from . import latent_fakes
from .latent_cases import build, builder_base, make_builder, make_impl, step_of
from .tree_cases import Batch, Request, chunk, make_batch, tree

BUDGET, RANK, ROPE, HEADS = 8, 64, 16, 4


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    latent_fakes.install(monkeypatch)


def batch_of(requests: list[Request], **given: Any) -> Batch:
    return make_batch(
        requests, num_heads=HEADS, num_kv_heads=1, head_size=RANK + ROPE, max_depth=7, **given
    )


def metadata_of(
    backend: str, batch: Batch, requests: list[Request], full_graphs: bool = False
) -> Any:
    builder = make_builder(backend, RANK, ROPE, HEADS, BUDGET + 1, full_graphs=full_graphs)
    return build(builder, batch, step_of(requests))


def assert_attends(backend: str, batch: Batch, metadata: Any) -> None:
    """The decodes' rows are as the reference has them, padding is 0."""
    decodes, n = metadata.num_decodes, metadata.num_decode_tokens
    query, cache = batch.query[:n], batch.k_cache
    expected = tree_attention_reference(
        query.double(),
        cache.double(),
        cache[..., :RANK].double(),
        batch.block_table[:decodes],
        batch.query_start_loc[: decodes + 1],
        batch.seq_lens[:decodes],
        batch.tail_lens[:decodes],
        batch.row_masks,
        batch.scale,
    )
    impl = make_impl(backend, RANK, ROPE, batch.scale)
    parts = tuple(part.contiguous() for part in query.split([RANK, ROPE], dim=-1))
    # Layers one after another, with the same metadata.
    for q in (parts, query):
        out, _ = impl.forward_mqa(q, cache[:, :, 0], metadata, None)
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", supported(latent=True))
@pytest.mark.parametrize(
    ("requests", "decodes"),
    [
        ([tree(20, 9), tree(33, 9)], 2),
        ([tree(0, 9), tree(33, 9)], 2),
        ([tree(20, 9), tree(33, 4), tree(7, 2)], 3),
        ([tree(20, 3), tree(33, 9), chunk(40, 1), chunk(0, 5), chunk(17, 30)], 4),
        ([tree(20, 2), chunk(16, 9), chunk(40, 1), chunk(50, 60), chunk(0, 70)], 3),
        ([tree(20, 9, before=4), chunk(0, 40)], 1),
        ([tree(20, 9), tree(33, 4), chunk(0, 40)], 2),
    ],
    ids=[
        "uniform",
        "no prefix",
        "short trees",
        "mixed",
        "as long as a tree",
        "rows before",
        "long prefills",
    ],
)
def test_decodes_attend_as_the_reference(
    backend: str, requests: list[Request], decodes: int
) -> None:
    """All trees, of any length, and the short requests behind them are vLLM's decodes; the order
    is that of Model Runner V2.
    """
    batch = batch_of(requests)
    metadata = metadata_of(backend, batch, requests)
    assert (metadata.num_decodes, metadata.num_prefills) == (decodes, len(requests) - decodes)
    assert metadata.num_decode_tokens == sum(request.query_len for request in requests[:decodes])
    others = any(request.query_len > request.tail_len for request in requests[:decodes])
    assert [tail.masks is not None for tail in metadata.tails] == [True] + [False] * others
    for tail in metadata.tails:
        assert not tail.prefix_lens[tail.lens == 0].any()
    assert_attends(backend, batch, metadata)


@pytest.mark.parametrize(
    ("backend", "requests", "decodes"),
    [
        ("TRITON_MLA", [chunk(3, 9), chunk(40, 1), chunk(0, 4), chunk(0, 11)], 3),
        ("TRITON_MLA", [chunk(0, 50)], 0),
        ("FLASH_ATTN_MLA", [chunk(3, 9), chunk(40, 1), chunk(0, 4), chunk(0, 11)], 4),
        ("FLASH_ATTN_MLA", [chunk(40, 1), chunk(17, 1), chunk(0, 600)], 2),
        ("FLASHMLA", [chunk(9, 3), chunk(40, 3), chunk(0, 11)], 2),
        ("FLASHMLA", [chunk(40, 1), chunk(17, 1), chunk(0, 200)], 2),
    ],
)
def test_steps_without_trees(backend: str, requests: list[Request], decodes: int) -> None:
    """vLLM's own split and kernel; where that takes single rows only, ours serves the rest."""
    batch = batch_of(requests)
    metadata = metadata_of(backend, batch, requests)
    assert (metadata.num_decodes, metadata.num_prefills) == (decodes, len(requests) - decodes)
    ours = backend == "TRITON_MLA" and decodes
    assert [tail.masks for tail in metadata.tails or ()] == ([None] if ours else [])
    if decodes:
        assert_attends(backend, batch, metadata)


def test_the_split_of_a_step_does_not_stay() -> None:
    builder = make_builder("FLASH_ATTN_MLA", RANK, ROPE, HEADS, BUDGET + 1)
    for first, decodes in ((tree(20, 9), 1), (chunk(20, 1), 2), (tree(20, 9), 1)):
        requests = [first, chunk(0, 40)]
        assert build(builder, batch_of(requests), step_of(requests)).num_decodes == decodes


def test_single_rows_keep_vllms_kernel() -> None:
    requests = [chunk(40, 1), chunk(17, 1), chunk(0, 1)]
    assert metadata_of("TRITON_MLA", batch_of(requests), requests).tails is None
    requests = [chunk(40, 1), chunk(17, 1), chunk(0, 40)]
    metadata = metadata_of("TRITON_MLA", batch_of(requests), requests)
    assert (metadata.num_decodes, metadata.tails) == (2, None)


@pytest.mark.parametrize("backend", supported(latent=True))
def test_padding_of_a_graph(backend: str) -> None:
    """Padded requests and rows count as decodes and get zeros."""
    requests = [tree(20, 9), tree(33, 9)]
    batch = batch_of(requests, padded_reqs=1, padded_rows=9)
    batch.query[18:] = 0.0  # a graph's padding rows are computed, too
    metadata = metadata_of(backend, batch, requests, full_graphs=True)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 27)
    (tail,) = metadata.tails
    assert tail.max_len == 9
    assert tail.masks.data_ptr() == batch.row_masks.data_ptr()
    assert tail.lens.data_ptr() == batch.tail_lens.data_ptr()
    assert_attends(backend, batch, metadata)


def test_flash_attention_plans_in_place() -> None:
    """Of every step the plan lies where a captured graph reads it, made of this step's prefixes."""
    builder = make_builder("FLASH_ATTN_MLA", RANK, ROPE, HEADS, BUDGET + 1, full_graphs=True)
    steps = ([tree(20, 9), tree(33, 9)], [chunk(5, 1), chunk(6, 1)], [tree(41, 9), tree(0, 9)])
    for requests in steps:
        batch = batch_of(requests)
        metadata = build(builder, batch, step_of(requests), max_seq_len=4096)
        plan = metadata.decode.scheduler_metadata
        assert plan.data_ptr() == builder.scheduler_metadata.data_ptr()
        assert not builder.scheduler_metadata[plan.shape[0] :].any()
        assert_attends("FLASH_ATTN_MLA", batch, metadata)
    mixed = [tree(20, 9), chunk(0, 4)]
    assert build(builder, batch_of(mixed), step_of(mixed)).decode.scheduler_metadata is None


def test_flash_attentions_partial_results_are_bounded() -> None:
    from vllm_ddtree.attention.backends.flash_attn_mla import prefix_splits

    assert prefix_splits(64 * 8, 0) == 32
    assert prefix_splits(64 * 8, 16) == 16
    assert prefix_splits(64 * 8, 1) == 1
    assert prefix_splits(32 * 64 * 8, 32) == 8
    assert prefix_splits(32 * 64 * 128, 32) == 1
    requests = [tree(20, 9)]
    for full_graphs in (False, True):
        metadata = metadata_of("FLASH_ATTN_MLA", batch_of(requests), requests, full_graphs)
        assert metadata.decode.max_num_splits == 32


@pytest.mark.parametrize(
    ("requests", "length"),
    [
        ([tree(20, 9), tree(33, 9)], 9),
        ([tree(20, 2), tree(33, 2)], 2),
        ([tree(20, 9), tree(33, 4)], 0),
        ([tree(20, 9), chunk(33, 9)], 0),
        ([tree(20, 8, before=1), tree(20, 9)], 0),
        ([chunk(33, 9)], 0),
    ],
)
def test_flashmla_takes_trees_of_one_length(requests: list[Request], length: int) -> None:
    assert metadata_of("FLASHMLA", batch_of(requests), requests).uniform_len == length


@pytest.mark.parametrize(("last", "length"), [(9, 9), (4, 0)])
def test_flashmla_with_padded_rows_but_no_requests_for_them(last: int, length: int) -> None:
    requests = [tree(20, 9), tree(33, last)]
    batch = batch_of(requests, padded_rows=5)
    metadata = metadata_of("FLASHMLA", batch, requests)
    assert metadata.uniform_len == length
    assert_attends("FLASHMLA", batch, metadata)


@pytest.mark.parametrize("backend", supported(latent=True))
def test_what_vllms_builder_starts_with(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """TRITON_MLA's reserves its decode kernel's scratch for the threshold that stands while it
    starts; the others keep their split for steps without trees.
    """
    seen = []
    base: Any = builder_base(backend)
    expected = base.reorder_batch_threshold, base.query_len_support

    def init(self: Any, *args: Any) -> None:
        seen.append((self.reorder_batch_threshold, self.query_len_support))

    monkeypatch.setattr(base, "__init__", init)
    kind: Any = make_impl(backend, RANK, ROPE, 1.0).tree_builder(base)
    builder = kind(None, ["layer"], None, torch.device("cpu"))
    assert issubclass(kind, MLACommonMetadataBuilder)
    assert kind.__name__ == f"Tree{base.__name__}"
    if backend == "TRITON_MLA":
        expected = (1, QueryLenSupport.SINGLE_ONLY)
    assert seen == [expected] and builder.own_split == expected
    assert np.isscalar(builder.reorder_batch_threshold)


def test_the_profile_reserves_for_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 asks the implementation, too."""
    seen = []
    monkeypatch.setattr(
        triton_mla,
        "_reserve_attn_logits_workspace",
        lambda config, *sizes: seen.append(sizes),
        raising=False,
    )
    impl: Any = TreeTritonMLAImpl.__new__(TreeTritonMLAImpl)
    impl._vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=32))
    impl.num_heads, impl.kv_lora_rank = 8, RANK
    impl.reserve_workspace()
    assert seen == [(32, 8, RANK)]
