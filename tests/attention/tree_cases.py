# SPDX-License-Identifier: Apache-2.0
"""Random verify batches with everything vLLM's runner would hand to the attention code.

Tensors are made on torch's default device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_ddtree.attention.kernels.reference import tree_attention_reference
from vllm_ddtree.attention.metadata.plain import TreeMetadata


def random_tree(rng: np.random.Generator, num_rows: int, max_depth: int) -> np.ndarray:
    """Parents int64 [num_rows] of a tree with its root in row 0, parents before children."""
    parents = np.full(num_rows, -1)
    depths = np.zeros(num_rows, dtype=int)
    for row in range(1, num_rows):
        candidates = np.flatnonzero(depths[:row] < max_depth)
        parents[row] = rng.choice(candidates)
        depths[row] = depths[parents[row]] + 1
    return parents


def ancestor_sets(parents: np.ndarray) -> list[set[int]]:
    """Per row: itself and its ancestors."""
    sets: list[set[int]] = []
    for row, parent in enumerate(parents.tolist()):
        sets.append({row} | (sets[parent] if parent >= 0 else set()))
    return sets


def pack_masks(sets: Sequence[set[int]], num_words: int) -> torch.Tensor:
    """int32 [rows, num_words]: bit b of word w says that row 32 * w + b is in the set."""
    words = np.zeros((len(sets), num_words), dtype=np.uint32)
    for row, members in enumerate(sets):
        for member in members:
            words[row, member // 32] |= np.uint32(1) << np.uint32(member % 32)
    return torch.tensor(words.view(np.int32))


@dataclass
class Request:
    """A request of the batch: ``query_len`` rows, the last ``tail_len`` of them its tree."""

    num_computed: int
    query_len: int
    tail_len: int = 0


def chunk(num_computed: int, query_len: int) -> Request:
    """Prefill chunk, or with one row plain decode."""
    return Request(num_computed, query_len)


def tree(num_computed: int, tail_len: int, before: int = 0) -> Request:
    """Tree request; ``before`` rows of its query precede the tree rows."""
    return Request(num_computed, before + tail_len, tail_len)


@dataclass
class Batch:
    """Tensors of one verify batch. Unused cache slots and padding rows hold NaN."""

    query: torch.Tensor  # [T, Hq, Dh]
    key: torch.Tensor  # [T, Hkv, Dh]
    value: torch.Tensor  # [T, Hkv, Dh]
    k_cache: torch.Tensor  # [num_blocks, block_size, Hkv, Dh]
    v_cache: torch.Tensor
    block_table: torch.Tensor  # int32 [R, max_blocks]
    query_start_loc: torch.Tensor  # int32 [R + 1]
    seq_lens: torch.Tensor  # int32 [R]
    tail_lens: torch.Tensor  # int32 [R]
    prefix_lens: torch.Tensor  # int32 [R]
    row_masks: torch.Tensor  # int32 [T, W]
    positions: torch.Tensor  # int64 [T], along the branch for tree rows
    slot_mapping: torch.Tensor  # int64 [T]
    tree_rows: torch.Tensor  # bool [T]
    scale: float


def reference_output(
    batch: Batch, window: int = 0, soft_cap: float = 0.0, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """float64 [T, Hq, Dh], right for tree rows."""
    return tree_attention_reference(
        batch.query.double(),
        batch.k_cache.double(),
        batch.v_cache.double(),
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.tail_lens,
        batch.row_masks,
        batch.scale,
        window,
        soft_cap,
        sinks,
    )


def backend_metadata(
    batch: Batch, max_tail: int, has_plain_rows: bool, in_graph: bool = False
) -> Any:
    """What a backend's implementation reads of a batch whose requests are `max_tail` rows or
    fewer."""
    return SimpleNamespace(
        tree=TreeMetadata(
            masks=batch.row_masks,
            positions=batch.positions,
            tail_lens=batch.tail_lens,
            prefix_lens=batch.prefix_lens,
            max_tail=max_tail,
            has_plain_rows=has_plain_rows,
            in_graph=in_graph,
        ),
        num_actual_tokens=int(batch.query_start_loc[-1]),
        query_start_loc=batch.query_start_loc,
        block_table=batch.block_table,
        slot_mapping=batch.slot_mapping,
        max_query_len=max_tail,
        max_seq_len=int(batch.seq_lens.max()),
        scheduler_metadata=None,
        max_num_splits=0,
    )


def empty_caches(
    layout: str, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN key and value caches as vLLM lays them out, viewed as [B, block_size, Hkv, Dh].

    "BNHC": K and V side by side per head, heads innermost; "BHNC": a head's slots together;
    "2BNHC": one tensor after the other.
    """
    if layout == "BNHC":
        cache = torch.full((num_blocks, block_size, num_kv_heads, 2 * head_size), float("nan"))
    elif layout == "BHNC":
        cache = torch.full((num_blocks, num_kv_heads, block_size, 2 * head_size), float("nan"))
        cache = cache.transpose(1, 2)
    else:
        pair = torch.full((2, num_blocks, block_size, num_kv_heads, head_size), float("nan"))
        return pair[0], pair[1]
    return cache[..., :head_size], cache[..., head_size:]


def make_batch(
    requests: Sequence[Request],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 32,
    block_size: int = 16,
    layout: str = "BHNC",
    num_words: int = 1,
    padded_reqs: int = 0,
    padded_rows: int = 0,
    max_depth: int = 15,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """A batch of ``requests``, followed by padded requests and rows.

    With a window, keys before that of a request's first row are NaN: their blocks have been freed.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    lens = [request.query_len for request in requests]
    num_rows = sum(lens)
    total = num_rows + padded_rows
    num_reqs = len(requests) + padded_reqs
    starts = np.cumsum([0, *lens] + [0] * padded_reqs)
    seq_lens = [request.num_computed + request.query_len for request in requests]
    used = [-(-seq_len // block_size) for seq_len in seq_lens]

    num_blocks = sum(used) + 3
    order = rng.permutation(num_blocks)
    table = rng.choice(order[sum(used) :], size=(num_reqs, max(used) + 1))  # free blocks: all NaN
    key = torch.randn(total, num_kv_heads, head_size)
    value = torch.randn(total, num_kv_heads, head_size)
    k_cache, v_cache = empty_caches(layout, num_blocks, block_size, num_kv_heads, head_size)
    slots = np.full(total, -1)
    masks = torch.zeros(total, num_words, dtype=torch.int32)
    positions = np.zeros(total, dtype=np.int64)
    tree_rows = torch.zeros(total, dtype=torch.bool)
    for req, request in enumerate(requests):
        table[req, : used[req]] = order[sum(used[:req]) : sum(used[: req + 1])]
        start, end = starts[req], starts[req + 1]
        position = np.arange(seq_lens[req])
        slot = table[req, position // block_size] * block_size + position % block_size
        slots[start:end] = slot[request.num_computed :]
        positions[start:end] = position[request.num_computed :]
        for cache, rows in ((k_cache, key), (v_cache, value)):
            content = torch.randn(seq_lens[req], num_kv_heads, head_size)
            content[request.num_computed :] = rows[start:end]
            if window:
                content[: max(0, request.num_computed - window + 1)] = float("nan")
            cache[slot // block_size, slot % block_size] = content
        if request.tail_len:
            parents = random_tree(rng, request.tail_len, max_depth)
            root = end - request.tail_len
            sets = ancestor_sets(parents)
            masks[root:end] = pack_masks(sets, num_words)
            positions[root:end] = positions[root] + [len(members) - 1 for members in sets]
            tree_rows[root:end] = True

    query = torch.randn(total, num_heads, head_size)
    for rows in (query, key, value):
        rows[num_rows:] = float("nan")
    tail_lens = [request.tail_len for request in requests] + [0] * padded_reqs
    prefix_lens = [
        seq_len - request.tail_len if request.tail_len else 0
        for seq_len, request in zip(seq_lens, requests, strict=True)
    ] + [0] * padded_reqs

    def to_int32(data: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.tensor(data, dtype=torch.int32)

    return Batch(
        query=query.to(dtype),
        key=key.to(dtype),
        value=value.to(dtype),
        k_cache=in_dtype(k_cache, dtype),
        v_cache=in_dtype(v_cache, dtype),
        block_table=to_int32(table),
        query_start_loc=to_int32(starts),
        seq_lens=to_int32(seq_lens + [0] * padded_reqs),
        tail_lens=to_int32(tail_lens),
        prefix_lens=to_int32(prefix_lens),
        row_masks=masks,
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        tree_rows=tree_rows,
        scale=head_size**-0.5,
    )


def in_dtype(
    view: torch.Tensor, dtype: torch.dtype, like: torch.Tensor | None = None
) -> torch.Tensor:
    """The view in another dtype with its strides, or another's (``to`` may change them)."""
    strides = (view if like is None else like).stride()
    out = torch.empty_strided(view.shape, strides, dtype=dtype)
    return out.copy_(view)
