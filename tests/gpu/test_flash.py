# SPDX-License-Identifier: Apache-2.0
"""Tree attention on FlashAttention's own kernel gives what the reference gives: windows, soft-caps
and sinks."""

from typing import Any

import pytest
import torch

from tests.attention.tree_cases import backend_metadata, make_batch, reference_output, tree
from tests.gpu.forward import assert_forward
from vllm_ddtree.attention.backends.flash_attn import TreeFlashAttentionImpl
from vllm_ddtree.attention.layer import Variant

REQUESTS = [tree(200, 32), tree(0, 20), tree(37, 32), tree(640, 5)]
MAX_TAIL, DEPTH = 32, 15


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("window", [0, 6, 128])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_trees(window: int, soft_cap: float, with_sinks: bool, in_graph: bool) -> None:
    """Against float64 on the same bfloat16 inputs.

    What is rounded to bfloat16: softmax weights and the prefix part's output, each relative to the
    largest value that a row can mix, and the output.
    """
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

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
    sinks = torch.linspace(-1, 4, 8, dtype=torch.bfloat16) if with_sinks else None
    impl: Any = TreeFlashAttentionImpl.__new__(TreeFlashAttentionImpl)
    impl.num_heads, impl.num_kv_heads, impl.num_queries_per_kv = 8, 2, 4
    impl.head_size, impl.scale, impl.sinks = 128, batch.scale, sinks
    impl.kv_cache_dtype = "auto"
    impl.tree_variant = Variant(window, window if window <= DEPTH else 0, soft_cap)
    impl.vllm_flash_attn_version = get_flash_attn_version(
        head_size=128, has_sinks=with_sinks, requires_softcap=bool(soft_cap)
    )
    metadata = backend_metadata(batch, MAX_TAIL, has_plain_rows=False, in_graph=in_graph)
    expected = reference_output(batch, window, soft_cap, sinks)
    assert_forward(impl, batch, metadata, expected, in_graph)
