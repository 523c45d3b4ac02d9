# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch go to the latent kernels: the builder over vLLM's own, and the backend's
implementation, against the reference."""

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
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAMetadataBuilder

from vllm_ddtree.attention.latent_metadata import latent_tree_builder
from vllm_ddtree.attention.reference import tree_attention_reference
from vllm_ddtree.attention.triton_mla import TreeTritonMLAImpl
from vllm_ddtree.runtime import Step

from .tree_cases import Batch, Request, chunk, make_batch, tree

BUDGET, RANK, ROPE, HEADS = 8, 64, 16, 4


class Prefill:
    """Stands for the backend of prefills."""

    def get_name(self) -> str:
        return "FLASH_ATTN"

    def prepare_metadata(self, metadata: Any) -> None:
        self.metadata = metadata


def make_builder(batch: Batch, step: Step) -> Any:
    """A builder as after its __init__, which needs a whole vLLM configuration."""
    rows = SimpleNamespace(
        tail_lens=batch.tail_lens, prefix_lens=batch.prefix_lens, masks=batch.row_masks
    )
    runtime = SimpleNamespace(step=step, rows=rows, num_rows=BUDGET + 1)
    layer = SimpleNamespace(impl=SimpleNamespace(tree_runtime=runtime))
    kind: Any = latent_tree_builder(TritonMLAMetadataBuilder)
    builder = kind.__new__(kind)
    context = SimpleNamespace(static_forward_context={"layer": layer})
    vars(builder).update(
        vllm_config=SimpleNamespace(compilation_config=context),
        layer_names=["layer"],
        query_len_support=QueryLenSupport.VARLEN,
        device=batch.query.device,
        use_pcp=False,
        dcp_world_size=1,
        dcp_local_block_size=1,
        dcp_virtual_block_size=1,
        dcp_manager=None,
        page_size=16,
        chunked_prefill_workspace=torch.empty(256, RANK + ROPE),
        chunked_prefill_workspace_size=256,
        metadata_cls=lambda **fields: SimpleNamespace(**fields),
        model_config=SimpleNamespace(dtype=torch.float32, get_head_size=lambda: RANK + ROPE),
        q_data_type=torch.float32,
        _prefill_backend=Prefill(),
    )
    return builder


def step_of(requests: list[Request]) -> Step:
    """As the model state makes it."""
    verifying = [request.query_len for request in requests if request.tail_len]
    return Step(
        has_trees=bool(verifying),
        max_verify_len=max(verifying, default=0),
        num_tree_rows=sum(request.tail_len for request in requests),
        has_plain_rows=any(r.query_len != r.tail_len for r in requests),
    )


def build(batch: Batch, step: Step) -> Any:
    lens = batch.query_start_loc.cpu()
    common = SimpleNamespace(
        num_reqs=len(batch.seq_lens),
        num_actual_tokens=batch.query.shape[0],
        max_query_len=int(lens.diff().max()),
        max_seq_len=int(batch.seq_lens.max()),
        block_table_tensor=batch.block_table,
        slot_mapping=batch.slot_mapping,
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=lens,
        seq_lens=batch.seq_lens,
        dcp_local_seq_lens=None,
        seq_lens_cpu_upper_bound=batch.seq_lens.cpu(),
        causal=True,
        is_prefilling=None,
    )
    builder = make_builder(batch, step)
    with torch.device("cpu"):  # vLLM's own tensors on the host
        return builder.build(0, common)


@pytest.mark.parametrize(
    ("requests", "decodes"),
    [
        ([tree(20, 9), tree(33, 9)], 2),
        ([tree(20, 9), tree(33, 4), tree(7, 2)], 3),
        ([tree(20, 3), tree(33, 9), chunk(40, 1), chunk(0, 5), chunk(17, 30)], 4),
        ([tree(20, 2), chunk(16, 9), chunk(40, 1), chunk(50, 60), chunk(0, 70)], 3),
        ([tree(20, 9, before=4), chunk(0, 40)], 1),
        ([chunk(3, 9), chunk(40, 1), chunk(0, 4), chunk(0, 11)], 3),
        ([tree(20, 9), tree(33, 4), chunk(0, 40)], 2),
        ([chunk(0, 50)], 0),
    ],
    ids=[
        "uniform",
        "short trees",
        "mixed",
        "as long as a tree",
        "rows before",
        "no trees",
        "long prefills",
        "none",
    ],
)
def test_decodes_attend_as_the_reference(requests: list[Request], decodes: int) -> None:
    """All trees, of any length, and the short requests behind them are vLLM's decodes; the order
    is that of Model Runner V2.
    """
    batch = make_batch(
        requests, num_heads=HEADS, num_kv_heads=1, head_size=RANK + ROPE, max_depth=7
    )
    metadata = build(batch, step_of(requests))
    assert (metadata.num_decodes, metadata.num_prefills) == (decodes, len(requests) - decodes)
    if not decodes:
        assert metadata.tails is None
        return
    n = metadata.num_decode_tokens
    assert n == sum(request.query_len for request in requests[:decodes])
    trees = any(request.tail_len for request in requests)
    others = any(request.query_len > request.tail_len for request in requests[:decodes])
    assert [tail.masks is not None for tail in metadata.tails] == [True] * trees + [False] * others
    impl: Any = TreeTritonMLAImpl.__new__(TreeTritonMLAImpl)
    impl.kv_lora_rank, impl.scale = RANK, batch.scale
    query, cache = batch.query[:n], batch.k_cache
    parts = tuple(part.contiguous() for part in query.split([RANK, ROPE], dim=-1))
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
    for q in (parts, query):
        out, _ = impl.forward_mqa(q, cache[:, :, 0], metadata, None)
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_single_rows_keep_vllms_kernel() -> None:
    requests = [chunk(40, 1), chunk(17, 1), chunk(0, 1)]
    batch = make_batch(requests, num_heads=HEADS, num_kv_heads=1, head_size=RANK + ROPE)
    assert build(batch, step_of(requests)).tails is None
    requests = [chunk(40, 1), chunk(17, 1), chunk(0, 40)]
    batch = make_batch(requests, num_heads=HEADS, num_kv_heads=1, head_size=RANK + ROPE)
    metadata = build(batch, step_of(requests))
    assert (metadata.num_decodes, metadata.tails) == (2, None)


def test_padding_of_a_graph() -> None:
    """Padded requests and rows count as decodes and get zeros."""
    requests = [tree(20, 9), tree(33, 9)]
    batch = make_batch(
        requests,
        num_heads=HEADS,
        num_kv_heads=1,
        head_size=RANK + ROPE,
        padded_reqs=1,
        padded_rows=9,
    )
    metadata = build(batch, step_of(requests))
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 27)
    (tail,) = metadata.tails
    assert tail.max_len == 9
    assert tail.masks.data_ptr() == batch.row_masks.data_ptr()
    assert tail.lens.data_ptr() == batch.tail_lens.data_ptr()
    impl: Any = TreeTritonMLAImpl.__new__(TreeTritonMLAImpl)
    impl.kv_lora_rank, impl.scale = RANK, batch.scale
    out, _ = impl.forward_mqa(batch.query, batch.k_cache[:, :, 0], metadata, None)
    assert not out[18:].any() and out[:18].isfinite().all()


def test_workspaces_are_for_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reserves its decode kernel's scratch for the threshold that stands while it starts."""
    seen = []

    def init(self: Any, *args: Any) -> None:
        seen.append((self.reorder_batch_threshold, self.query_len_support))

    monkeypatch.setattr(TritonMLAMetadataBuilder, "__init__", init)
    kind: Any = latent_tree_builder(TritonMLAMetadataBuilder)
    builder = kind(None, ["layer"], None, torch.device("cpu"))
    assert issubclass(kind, MLACommonMetadataBuilder)
    assert seen == [(1, QueryLenSupport.SINGLE_ONLY)]
    assert builder.query_len_support is QueryLenSupport.VARLEN
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
