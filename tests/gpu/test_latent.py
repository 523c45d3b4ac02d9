# SPDX-License-Identifier: Apache-2.0
"""Latent (MLA) tree attention, compiled at the sizes of DeepSeek and Kimi, gives what the reference
gives, on each of vLLM's backends and in CUDA graphs that are replayed on other prefixes than they
were captured on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.attention.latent_cases import build, make_builder, make_impl, step_of
from tests.attention.tree_cases import Batch, Request, chunk, make_batch, tree
from vllm_ddtree.attention.kernels.reference import tree_attention_reference

RANK, ROPE = 512, 64
FORMS = {
    # backend, block size; FlashAttention 3 reads blocks of 64 in another way than smaller ones
    "TRITON_MLA": ("TRITON_MLA", 16),
    "FLASH_ATTN_MLA-16": ("FLASH_ATTN_MLA", 16),
    "FLASH_ATTN_MLA-64": ("FLASH_ATTN_MLA", 64),
    "FLASHMLA": ("FLASHMLA", 64),
}
TREES = {
    "one": [tree(3000, 64)],
    "long": [tree(9000, 16), tree(40, 16)],
    "several": [tree(200, 32), tree(0, 20), tree(37, 32), tree(640, 5)],
    "short": [tree(90, 2), tree(5, 2)],
    "many": [tree(17 * i, 8) for i in range(40)],
}
MIXED = {
    "prefills": [tree(200, 32), tree(37, 5), chunk(640, 1), chunk(0, 20), chunk(64, 9)],
    "rows before": [tree(200, 20, before=7), tree(0, 20), chunk(1000, 1)],
    "no trees": [chunk(700, 1), chunk(0, 1), chunk(63, 1)],
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> tuple[str, int]:
    backend, block_size = FORMS[request.param]
    if backend != "TRITON_MLA" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"{backend} needs Hopper")
    return backend, block_size


def latent_batch(requests: list[Request], heads: int, block_size: int, **given: Any) -> Batch:
    """Scores with a spread of 4, so that a few keys decide each row; a cache holds numbers, which
    the backends' kernels may multiply by 0 behind the prefix.
    """
    longest = max(request.query_len for request in requests)
    batch = make_batch(
        requests,
        num_heads=heads,
        num_kv_heads=1,
        head_size=RANK + ROPE,
        block_size=block_size,
        num_words=(longest + 31) // 32,
        dtype=torch.bfloat16,
        **given,
    )
    batch.query *= 4
    batch.k_cache.nan_to_num_(0.0)
    return batch


def parts_of(batch: Batch, num_rows: int) -> tuple[torch.Tensor, ...]:
    return tuple(part.contiguous() for part in batch.query[:num_rows].split([RANK, ROPE], dim=-1))


def assert_attends(batch: Batch, metadata: Any, out: torch.Tensor) -> None:
    """Against float64 on the same bfloat16 inputs, row by row and head by head.

    What is rounded to bfloat16: softmax weights, perhaps the prefix part, and the output.
    """
    decodes = metadata.num_decodes
    rows = int(batch.query_start_loc[decodes])
    cache = batch.k_cache.double()
    expected = tree_attention_reference(
        batch.query[:rows].double(),
        cache,
        cache[..., :RANK],
        batch.block_table[:decodes],
        batch.query_start_loc[: decodes + 1],
        batch.seq_lens[:decodes],
        batch.tail_lens[:decodes],
        batch.row_masks,
        batch.scale,
    )
    error = (out[:rows].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 2 * torch.finfo(torch.bfloat16).eps
    if metadata.tails is not None:
        assert not out[rows:].any()


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("kind", [*TREES, *MIXED])
def test_eager(kind: str, heads: int, form: tuple[str, int]) -> None:
    backend, block_size = form
    requests = {**TREES, **MIXED}[kind]
    if heads == 128:
        requests = requests[:8]
    batch = latent_batch(requests, heads, block_size)
    num_rows = max(request.tail_len for request in requests) or 8
    builder = make_builder(
        backend, RANK, ROPE, heads, num_rows, block_size=block_size, dtype=torch.bfloat16
    )
    metadata = build(builder, batch, step_of(requests))
    impl = make_impl(backend, RANK, ROPE, batch.scale)
    assert metadata.num_decodes == len(requests)
    layer = SimpleNamespace(_k_scale=torch.ones(1))
    for _ in range(2):  # layers, with the same metadata
        out, _ = impl.forward_mqa(
            parts_of(batch, metadata.num_decode_tokens), batch.k_cache[:, :, 0], metadata, layer
        )
        assert_attends(batch, metadata, out)


@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("kind", TREES)
def test_replay_on_other_prefixes(kind: str, heads: int, form: tuple[str, int]) -> None:
    """A graph of two layers, its metadata built anew for each replay, as an engine does it."""
    backend, block_size = form
    requests = TREES[kind][: 8 if heads == 128 else None]
    length = requests[0].tail_len
    batch = latent_batch(requests, heads, block_size, padded_reqs=1, padded_rows=length)
    batch.query[int(batch.query_start_loc[-1]) :] = 0.0
    builder = make_builder(
        backend,
        RANK,
        ROPE,
        heads,
        max(request.tail_len for request in requests),
        block_size=block_size,
        full_graphs=True,
        dtype=torch.bfloat16,
    )
    impl = make_impl(backend, RANK, ROPE, batch.scale)
    parts, cache = parts_of(batch, batch.query.shape[0]), batch.k_cache[:, :, 0]

    def build_metadata(max_seq_len: int | None = None) -> Any:
        return build(builder, batch, step_of(requests), max_seq_len)

    warm = build_metadata(16384)
    impl.forward_mqa(parts, cache, warm, None)
    metadata = build_metadata(16384)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [impl.forward_mqa(parts, cache, metadata, None)[0] for _ in range(2)]

    for share in (1.0, 0.6, 0.25, 0.0):
        shorten(batch, requests, share)
        metadata = build_metadata()
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            assert_attends(batch, metadata, out)


def shorten(batch: Batch, requests: list[Request], share: float) -> None:
    """Leave this share of each prefix, in place; the trees' keys move along. Shares must fall."""
    block_size = batch.k_cache.shape[1]
    for i, request in enumerate(requests):
        prefix = int(request.num_computed * share)
        rows = slice(int(batch.query_start_loc[i]), int(batch.query_start_loc[i + 1]))
        old = batch.slot_mapping[rows]
        keys = batch.k_cache[old // block_size, old % block_size].clone()
        place = prefix + torch.arange(request.tail_len)
        new = batch.block_table[i][place // block_size].long() * block_size + place % block_size
        batch.k_cache[new // block_size, new % block_size] = keys
        batch.slot_mapping[rows] = new
        batch.prefix_lens[i] = prefix
        batch.seq_lens[i] = prefix + request.tail_len
