# SPDX-License-Identifier: Apache-2.0
"""Capture sizes of draft and verify."""

import itertools

import pytest

from vllm_ddtree.graphs.sizes import MAX_DRAFT_TOKENS, auto_sizes, draft_sizes, request_counts


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 17, 256, 300])
def test_request_counts(limit: int) -> None:
    counts = request_counts(limit)
    assert counts == sorted(set(counts))
    assert counts[0] == 1 and counts[-1] == limit


@pytest.mark.parametrize("block_size", [2, 8, 10, 16, 32])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 64, 1024])
def test_draft_sizes_are_whole_blocks(block_size: int, max_num_seqs: int) -> None:
    sizes = draft_sizes(block_size, max_num_seqs, 8192, [32, 512])
    assert all(size % block_size == 0 for size in sizes)
    assert sizes[0] == block_size
    assert sizes[-1] <= min(max_num_seqs * block_size, MAX_DRAFT_TOKENS)
    # Every batch below the largest has a graph that is at most twice its size.
    for num_reqs in range(1, sizes[-1] // block_size + 1):
        fitting = min(size for size in sizes if size >= num_reqs * block_size)
        assert fitting <= max(2 * num_reqs, num_reqs + 15) * block_size


def test_draft_follows_the_verify_step() -> None:
    assert draft_sizes(16, 8, 8192, []) == []
    assert draft_sizes(16, 512, 8192, [4096])[-1] == 4096
    assert draft_sizes(16, 512, 256, [512])[-1] == 256


@pytest.mark.parametrize("largest", [1, 7, 512, 1024])
def test_auto_sizes(largest: int) -> None:
    sizes = auto_sizes(largest)
    assert sizes[0] == 1 and sizes[-1] <= largest
    assert all(b / a <= 2 for a, b in itertools.pairwise(sizes))
    for rows in (4, 8, 16, 32, 64):
        counts = {size // rows for size in sizes if size % rows == 0 and size >= rows}
        assert counts >= {n for n in (1, 2, 3, 4, 6, 8) if n * rows <= largest}
