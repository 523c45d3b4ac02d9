# SPDX-License-Identifier: Apache-2.0
"""The backend's own rows, the prefix and the tail together give what the reference gives for every
batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from tests.attention.tree_cases import Batch, Request, chunk, make_batch, tree
from vllm_ddtree.attention.backends.flash_attn import TreeFlashAttentionImpl
from vllm_ddtree.attention.backends.triton_attn import TreeTritonAttentionImpl
from vllm_ddtree.attention.forward.plain import tree_forward
from vllm_ddtree.attention.kernels.reference import tree_attention_reference
from vllm_ddtree.attention.layer import Variant
from vllm_ddtree.attention.metadata.plain import TreeMetadata

PLAIN = Variant()


def reference(
    batch: Batch,
    tail_lens: torch.Tensor,
    variant: Variant = PLAIN,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    return tree_attention_reference(
        batch.query,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        tail_lens,
        batch.row_masks,
        batch.scale,
        variant.window,
        variant.soft_cap,
        sinks,
    )


class CausalBackend:
    """Stands for a backend's own implementation; counts its calls."""

    def __init__(self, batch: Batch, variant: Variant, sinks: torch.Tensor | None) -> None:
        self.batch, self.calls = batch, 0
        self.tree_variant, self.sinks = variant, sinks
        self.num_kv_heads = batch.key.shape[1]
        self.num_heads, self.head_size = batch.query.shape[1:]
        self.num_queries_per_kv = self.num_heads // self.num_kv_heads
        self.scale, self.kv_cache_dtype = batch.scale, "auto"

    def plain_forward(self, *args: Any) -> torch.Tensor:
        self.calls += 1
        output = args[6]
        no_trees = torch.zeros_like(self.batch.tail_lens)
        output.copy_(reference(self.batch, no_trees, self.tree_variant, self.sinks))
        return output


class TreeBackend(CausalBackend):
    forward: Any = tree_forward
    prefix_pass: Any = TreeTritonAttentionImpl.prefix_pass


def run(
    batch: Batch,
    requests: list[Request],
    with_tree: bool,
    fresh: bool,
    variant: Variant = PLAIN,
    sinks: torch.Tensor | None = None,
) -> Any:
    impl = TreeBackend(batch, variant, sinks)
    num_rows = int(batch.query_start_loc[-1])
    plain = any(r.tail_len != r.query_len for r in requests)
    part = TreeMetadata(
        masks=batch.row_masks,
        positions=batch.positions,
        tail_lens=batch.tail_lens,
        prefix_lens=batch.prefix_lens,
        max_tail=8,
        has_plain_rows=plain,
        in_graph=False,
    )
    metadata = SimpleNamespace(
        tree=part if with_tree else None,
        num_actual_tokens=num_rows,
        query_start_loc=batch.query_start_loc,
        block_table=batch.block_table,
        slot_mapping=batch.slot_mapping,
    )
    # [num_blocks, Hkv, block_size, K | V]
    cache = torch.cat([batch.k_cache, batch.v_cache], dim=-1).transpose(1, 2)
    output = torch.full_like(batch.query, 7.0)
    key, value = (batch.key, batch.value) if fresh else (None, None)
    result = impl.forward(torch.nn.Module(), batch.query, key, value, cache, metadata, output)
    assert result is output
    return impl, output[:num_rows]


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "paged"])
@pytest.mark.parametrize(
    "requests",
    [
        [tree(20, 8), tree(3, 5)],
        [tree(20, 8), chunk(0, 9), chunk(17, 1), tree(33, 2)],
        [tree(5, 8, before=3)],
    ],
    ids=["trees", "mixed", "rows before the tree"],
)
def test_trees_and_other_rows(requests: list[Request], fresh: bool) -> None:
    batch = make_batch(requests)
    impl, output = run(batch, requests, with_tree=True, fresh=fresh)
    expected = reference(batch, batch.tail_lens)[: output.shape[0]]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    # The backend's own pass runs only where rows outside trees need it.
    assert impl.calls == any(r.tail_len != r.query_len for r in requests)


def test_without_trees_the_backend_alone() -> None:
    requests = [chunk(0, 9), chunk(17, 1)]
    batch = make_batch(requests)
    impl, output = run(batch, requests, with_tree=False, fresh=True)
    assert impl.calls == 1
    assert torch.equal(output, reference(batch, batch.tail_lens)[: output.shape[0]])


@pytest.mark.parametrize("window", [4, 20])
def test_window_soft_cap_and_sinks(window: int) -> None:
    """Rows outside trees from the backend, tree rows from both passes: the variant reaches all."""
    requests = [tree(20, 8), chunk(0, 9), chunk(37, 1), tree(33, 2), tree(5, 8, before=3)]
    batch = make_batch(requests, window=window)
    variant = Variant(window, window if window <= 15 else 0, soft_cap=1.5)
    sinks = torch.linspace(-1, 2, batch.query.shape[1])
    _, output = run(batch, requests, with_tree=True, fresh=True, variant=variant, sinks=sinks)
    expected = reference(batch, batch.tail_lens, variant, sinks)[: output.shape[0]]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("tree_class", "base"),
    [
        (TreeTritonAttentionImpl, TritonAttentionImpl),
        (TreeFlashAttentionImpl, FlashAttentionImpl),
    ],
)
def test_a_layer_can_become_a_tree_layer(tree_class: type, base: Any) -> None:
    """A loaded layer's implementation is given its new class: the layouts must agree."""
    impl = object.__new__(base)
    impl.scale = 0.5
    impl.__class__ = tree_class
    assert impl.forward.__func__ is tree_forward
    assert impl.plain_forward.__func__ is base.forward
