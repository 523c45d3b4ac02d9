# SPDX-License-Identifier: Apache-2.0
"""Prefixes in segments, and the FlashInfer backend over them, give what the reference gives for
every batch. FlashInfer's kernel is a stand-in."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ddtree.attention.kernels.segments import SegmentTable
from vllm_ddtree.attention.layer import Variant
from vllm_ddtree.round.step import Step

from . import flashinfer_fakes
from .tree_cases import Batch, Request, chunk, make_batch, reference_output, tree

ROWS = 9
"""Of a full tree."""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_fakes.install(monkeypatch)


@pytest.mark.parametrize("segments", [1, 2, 5, 16])
@pytest.mark.parametrize("page_size", [16, 64])
def test_segments_are_the_prefix(segments: int, page_size: int, device: str) -> None:
    """In order, without gaps, of whole 64 keys but for the last; what is behind stays."""
    lens = [0, 1, 15, 16, 17, 64, 65, 1000, 0, 3000]
    most = -(-max(lens) // page_size)
    table = torch.randperm(len(lens) * (most + 3), dtype=torch.int32).view(len(lens), -1)[:, :most]
    made = SegmentTable(len(lens) + 6, most, page_size, torch.device(device))
    for buffer in (made.starts, made.last_lens, made.pages):
        buffer.fill_(-7)
    made.fill(table, torch.tensor(lens, dtype=torch.int32), segments)
    entries = segments * len(lens)
    starts, last_lens = made.starts.tolist(), made.last_lens.tolist()
    assert starts[0] == 0 and starts[entries] == sum(-(-n // page_size) for n in lens)
    assert set(starts[entries + 1 :]) | set(last_lens[entries:]) <= {-7}
    assert set(made.pages[starts[entries] :].tolist()) <= {-7}
    for req, num_keys in enumerate(lens):
        keys, pages = [], []
        for entry in range(req, entries, len(lens)):
            own = made.pages[starts[entry] : starts[entry + 1]].tolist()
            pages += own
            assert own or last_lens[entry] == 0
            keys.append((len(own) - 1) * page_size + last_lens[entry] if own else 0)
        assert pages == table[req, : -(-num_keys // page_size)].tolist()
        assert sum(keys) == num_keys
        filled = [n for n in keys if n]
        assert all(n % 64 == 0 for n in filled[:-1]) and keys[: len(filled)] == filled
        if num_keys > 64 * segments:
            assert max(keys) < num_keys / segments + 64


class PlainBuilder:
    """What vLLM's builder gives ours; notes the steps that it is asked for."""

    reorder_batch_threshold = 5
    logits_soft_cap: float | None = None

    def __init__(self, spec: Any, layer_names: list[str], config: Any, device: Any) -> None:
        self.layer_names, self.vllm_config, self.device = layer_names, config, torch.device(device)
        self.model_config = config.model_config
        self.num_qo_heads, self.num_kv_heads, self.head_dim = 4, 2, 32
        self.page_size, self.sm_scale = 16, 32**-0.5
        self.thresholds: list[int] = []

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        self.thresholds.append(self.reorder_batch_threshold)
        return SimpleNamespace(
            num_actual_tokens=common.num_actual_tokens, slot_mapping=common.slot_mapping
        )


def make_builder(monkeypatch: pytest.MonkeyPatch, device: str, segments: int = 1) -> Any:
    from vllm_ddtree.attention.backends import flashinfer, flashinfer_prefix

    monkeypatch.setattr(flashinfer_prefix, "choose_num_segments", lambda *_: segments)
    runtime = SimpleNamespace(num_rows=ROWS, step=None, rows=None)
    layer = SimpleNamespace(impl=SimpleNamespace(tree_runtime=runtime))
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1024, dtype=torch.float32),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
    )
    builder = flashinfer.flashinfer_builder(PlainBuilder)(None, ["layer"], config, device)
    builder.runtime = runtime
    return builder


def build(builder: Any, batch: Batch, requests: list[Request], in_graph: bool = False) -> Any:
    """The metadata of a batch. The host knows rows, and no lengths."""
    lens = [r.query_len for r in requests]
    builder.runtime.step = Step(
        has_trees=any(r.tail_len > 2 for r in requests),
        max_verify_len=max((r.query_len for r in requests if r.tail_len), default=0),
        has_plain_rows=any(r.tail_len != r.query_len for r in requests),
        in_graph=in_graph,
    )
    builder.runtime.rows = SimpleNamespace(
        masks=batch.row_masks,
        positions=batch.positions,
        tail_lens=batch.tail_lens,
        prefix_lens=batch.prefix_lens,
    )
    return builder.build(
        0,
        SimpleNamespace(
            num_reqs=batch.seq_lens.shape[0],
            num_actual_tokens=batch.query.shape[0],
            max_query_len=max(lens),
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=batch.query_start_loc.cpu(),
            block_table_tensor=batch.block_table,
            slot_mapping=batch.slot_mapping,
        ),
    )


def attend(batch: Batch, metadata: Any, variant: Variant) -> torch.Tensor:
    """What a layer puts out."""
    from vllm_ddtree.attention.backends.flashinfer import TreeFlashInferImpl

    class Impl(TreeFlashInferImpl):
        def plain_forward(self, *args: Any) -> torch.Tensor:
            no_trees = torch.zeros_like(batch.tail_lens)
            plain = dataclasses.replace(batch, tail_lens=no_trees)
            return args[6].copy_(reference_output(plain, variant.window, variant.soft_cap))

    impl: Any = Impl.__new__(Impl)
    impl.num_heads, impl.num_kv_heads, impl.num_queries_per_kv, impl.head_size = 4, 2, 2, 32
    impl.scale, impl.sinks, impl.kv_cache_dtype = batch.scale, None, "auto"
    impl.tree_variant = variant
    # [num_blocks, block_size, Hkv, K | V] with the batch's strides
    cache = torch.empty_strided((*batch.k_cache.shape[:3], 64), batch.k_cache.stride())
    cache[..., :32], cache[..., 32:] = batch.k_cache, batch.v_cache
    output = torch.full_like(batch.query, 7.0)
    kv_cache = cache.transpose(1, 2)
    layer = torch.nn.Module()
    impl.forward(layer, batch.query, batch.key, batch.value, kv_cache, metadata, output)
    return output


UNIFORM = [tree(20, ROWS), tree(0, ROWS), tree(200, ROWS), tree(129, ROWS), tree(64, ROWS)]


@pytest.mark.parametrize(
    ("requests", "padded"),
    [(UNIFORM, 0), (UNIFORM, 2), ([tree(600, 4)], 0), ([tree(0, 4), tree(1, 4)], 1)],
    ids=["", "padded", "one", "short"],
)
@pytest.mark.parametrize("segments", [1, 3, 16])
@pytest.mark.parametrize("layout", ["BNHC", "BHNC"])
def test_trees_of_one_length(
    layout: str,
    segments: int,
    requests: list[Request],
    padded: int,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
) -> None:
    """Every key of the prefix counts once and none behind it (they are NaN)."""
    builder = make_builder(monkeypatch, device, segments)
    rows = requests[0].tail_len
    batch = make_batch(
        requests, layout=layout, padded_reqs=padded, padded_rows=padded * rows, max_depth=7
    )
    metadata = build(builder, batch, requests)
    plan = metadata.prefix
    assert (plan.num_reqs, plan.length, plan.segments) == (len(requests) + padded, rows, segments)
    assert builder.thresholds == []  # vLLM's builder would wait for the device
    output = attend(batch, metadata, Variant())
    trees = batch.tree_rows
    torch.testing.assert_close(
        output[trees].double(), reference_output(batch)[trees], atol=1e-5, rtol=1e-5
    )


def test_one_plan_for_every_length(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """As in a CUDA graph: planned once, the same buffers with each step's prefixes."""
    builder = make_builder(monkeypatch, device, segments=3)
    assert flashinfer_fakes.Wrapper.plans_made == 1  # at the start, to compile
    plans: set[Any] = set()
    for prefixes in ((20, 300), (700, 0), (1, 129), (0, 0)):
        requests = [tree(n, ROWS) for n in prefixes]
        batch = make_batch(requests, max_depth=7)
        metadata = build(builder, batch, requests, in_graph=not plans)
        plans.add(metadata.prefix)
        torch.testing.assert_close(
            attend(batch, metadata, Variant()).double(),
            reference_output(batch),
            atol=1e-5,
            rtol=1e-5,
        )
    assert len(plans) == 1 and flashinfer_fakes.Wrapper.plans_made == 2


def test_plans_outside_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    from vllm_ddtree.attention.backends import flashinfer_prefix

    monkeypatch.setattr(flashinfer_prefix, "MAX_EAGER_PLANS", 2)
    plans = make_builder(monkeypatch, device).plans
    assert plans.get(1, ROWS, in_graph=False) is not None
    assert plans.get(2, ROWS, in_graph=False) is not None
    assert plans.get(3, ROWS, in_graph=False) is None
    assert plans.get(3, ROWS, in_graph=True) is plans.get(3, ROWS, in_graph=False) is not None


@pytest.mark.parametrize(
    ("requests", "asked"),
    [
        ([tree(20, ROWS), tree(33, 4)], []),
        ([tree(20, ROWS), tree(40, ROWS), chunk(40, 1), chunk(0, 25)], [1]),
        ([tree(20, 6, before=3)], [1]),
    ],
    ids=["lengths", "mixed", "rows before"],
)
def test_other_steps(
    requests: list[Request], asked: list[int], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """No plan: our own kernel reads the prefixes; to vLLM's builder all rows are prefills'."""
    builder = make_builder(monkeypatch, device)
    batch = make_batch(requests, max_depth=7)
    metadata = build(builder, batch, requests)
    assert metadata.prefix is None
    assert (builder.thresholds, builder.reorder_batch_threshold) == (asked, 5)
    torch.testing.assert_close(
        attend(batch, metadata, Variant()).double(), reference_output(batch), atol=1e-5, rtol=1e-5
    )


def test_padded_requests_need_padding_rows(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """FlashInfer would write beyond the batch."""
    builder = make_builder(monkeypatch, device)
    requests = [tree(20, ROWS)]
    for padding, planned in ((ROWS, True), (ROWS - 1, False)):
        batch = make_batch(requests, max_depth=7, padded_reqs=1, padded_rows=padding)
        assert (build(builder, batch, requests).prefix is not None) == planned


def test_a_step_without_trees_is_vllms(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    builder = make_builder(monkeypatch, device)
    requests = [chunk(20, 1), chunk(0, 9)]
    metadata = build(builder, make_batch(requests), requests)
    assert metadata.tree is None and builder.thresholds == [5]


@pytest.mark.parametrize(
    ("variant", "scale"),
    [(Variant(window=24), 32**-0.5), (Variant(soft_cap=1.5), 32**-0.5), (Variant(), 0.3)],
    ids=["window", "soft-cap", "scale"],
)
def test_what_was_not_planned(
    variant: Variant, scale: float, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A layer that is not as its group's plan is read by our own kernel."""
    builder = make_builder(monkeypatch, device)
    batch = make_batch(UNIFORM, max_depth=7, window=variant.window)
    metadata = build(builder, batch, UNIFORM)
    batch.scale = scale
    output = attend(batch, metadata, variant)
    expected = reference_output(batch, variant.window, variant.soft_cap)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def test_soft_caps_are_planned(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(PlainBuilder, "logits_soft_cap", 1.5)
    builder = make_builder(monkeypatch, device, segments=3)
    batch = make_batch(UNIFORM, max_depth=7)
    metadata = build(builder, batch, UNIFORM)
    assert metadata.prefix.soft_cap == 1.5
    output = attend(batch, metadata, Variant(soft_cap=1.5))
    expected = reference_output(batch, 0, 1.5)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
