# SPDX-License-Identifier: Apache-2.0
"""Latent (MLA) tree attention compiled, at the sizes of DeepSeek and Kimi, and in a CUDA graph."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.attention.tree_cases import make_batch, tree
from vllm_ddtree.attention.latent import Tail
from vllm_ddtree.attention.reference import latent_attention_reference
from vllm_ddtree.attention.triton_mla import TreeTritonMLAImpl

RANK, ROPE = 512, 64
REQUESTS = {
    "one": [tree(3000, 64)],
    "several": [tree(200, 32), tree(0, 20), tree(37, 32), tree(640, 5)],
    "short": [tree(90, 2), tree(5, 3)],
    "many": [tree(17 * i, 16) for i in range(40)],
}


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "chain"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("kind", REQUESTS)
def test_trees(kind: str, heads: int, in_graph: bool, causal: bool) -> None:
    """Against float64 on the same bfloat16 inputs.

    What is rounded to bfloat16: softmax weights and, where keys are not cut into segments, the
    prefix part's output, each relative to the largest value that a row can mix, and the output.
    """
    requests = REQUESTS[kind]
    if heads == 128 and kind in ("one", "many"):
        requests = requests[:8]
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
    cache = batch.k_cache[:, :, 0]
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
    parts = tuple(part.contiguous() for part in batch.query.split([RANK, ROPE], dim=-1))

    out, _ = impl.forward_mqa(parts, cache, metadata, None)
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = impl.forward_mqa(parts, cache, metadata, None)
        out.fill_(float("nan"))
        graph.replay()
    rows = int(batch.query_start_loc[-1])
    assert not out[rows:].any()
    expected = torch.zeros(*batch.query.shape[:2], RANK, dtype=torch.float64)
    latent_attention_reference(
        batch.query.double(),
        cache.double(),
        RANK,
        batch.block_table,
        tail.ends,
        tail.lens,
        tail.prefix_lens,
        tail.masks,
        expected,
        batch.scale,
    )
    unit = torch.finfo(torch.bfloat16).eps
    largest = float(torch.nan_to_num(cache).abs().max())
    torch.testing.assert_close(
        out[:rows].double(), expected[:rows], rtol=unit, atol=2 * unit * largest
    )
