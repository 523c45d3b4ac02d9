# SPDX-License-Identifier: Apache-2.0
"""The rows outside trees, as a batch of their own for vLLM's builder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_ddtree.recurrent.metadata import PlainPart, plain_metadata


def common(num_rows: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *np.cumsum(num_rows)], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.cpu(),
        seq_lens=lens,
        num_reqs=len(num_rows),
        num_actual_tokens=sum(num_rows),
        max_query_len=max(num_rows),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.arange(len(num_rows) * 3).view(-1, 3),
        slot_mapping=torch.arange(sum(num_rows)) + 100,
        is_prefilling=torch.tensor([n > 5 for n in num_rows], device="cpu"),
        seq_lens_cpu_upper_bound=lens.cpu() + 2,
    )


def test_requests_beside_trees() -> None:
    """A tree, a decode, a tree behind two rows of its prompt, and a prefill."""
    rows, trees = [4, 1, 5, 7], np.array([4, 0, 3, 0])
    batch = common(rows, [20, 9, 33, 7])
    part = PlainPart.of(np.array(rows), trees)
    assert part.reqs.tolist() == [1, 2, 3] and part.lens.tolist() == [1, 2, 7]
    assert part.rows.tolist() == [4, 5, 6, *range(10, 17)]
    got = plain_metadata(batch, part, trees, torch.tensor(part.rows), torch.tensor(part.reqs))
    assert got.query_start_loc.tolist() == got.query_start_loc_cpu.tolist() == [0, 1, 3, 10]
    # The request whose tree follows ends before it.
    assert got.seq_lens.tolist() == [9, 30, 7]
    assert got.seq_lens_cpu_upper_bound.tolist() == [11, 32, 9]
    assert (got.num_reqs, got.num_actual_tokens, got.max_query_len) == (3, 10, 7)
    assert got.block_table_tensor.tolist() == batch.block_table_tensor[1:].tolist()
    assert got.slot_mapping.tolist() == [104, 105, 106, *range(110, 117)]
    assert got.is_prefilling.tolist() == [False, False, True]
    assert got.compute_num_computed_tokens().tolist() == [8, 28, 0]


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_outside_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = rng.integers(0, 4, 8)
    rows = trees + np.where((rng.random(8) < 0.5) & (trees > 0), 0, rng.integers(1, 5, 8))
    part = PlainPart.of(rows, trees)
    ends = np.cumsum(rows)
    in_tree = {r for end, n in zip(ends, trees, strict=True) for r in range(end - n, end)}
    assert part.rows.tolist() == [r for r in range(ends[-1]) if r not in in_tree]
