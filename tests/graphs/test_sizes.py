# SPDX-License-Identifier: Apache-2.0
"""Draft and verify have captured graphs of the sizes that their steps have."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ddtree.budget.tiers import TIERS
from vllm_ddtree.config.graphs import set_capture_sizes
from vllm_ddtree.graphs.sizes import (
    MAX_AUTO_TOKENS,
    MAX_DRAFT_TOKENS,
    auto_sizes,
    draft_sizes,
    request_counts,
    verify_sizes,
)


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


@pytest.mark.parametrize("limit", [1, 10, 12, 20, 50, 100, 256, 1000])
@pytest.mark.parametrize("largest", [64, 512, 1024])
def test_auto_sizes(largest: int, limit: int) -> None:
    rows = [budget + 1 for budget in TIERS]
    sizes = auto_sizes(largest, rows, limit)
    assert sizes[0] == 1 and sizes[-1] <= largest and sizes == sorted(set(sizes))
    for num_rows in rows:
        # As vLLM makes them: sizes rounded up to whole requests, at most `limit` of them.
        counts = {
            -(-size // num_rows) for size in sizes if -(-size // num_rows) * num_rows <= largest
        }
        counts = {n for n in counts if n <= limit}
        for num_reqs in range(1, min(limit, largest // num_rows) + 1):
            fitting = [n for n in counts if n >= num_reqs]
            if num_reqs <= max(counts):
                assert min(fitting) <= 2 * num_reqs
        # The most that may run have a graph, unless they exceed the ceiling.
        assert limit * num_rows > largest or limit in counts


def test_verify_sizes_cover_every_number_of_requests() -> None:
    own = [1, 2, 4, 8, 16, 256, 512]
    sizes = verify_sizes(own, [(32, 40), (8, 256)], largest=2048)
    assert set(own) <= set(sizes) and sizes == sorted(set(sizes)) and sizes[-1] <= 2048
    for rows, limit in ((32, 40), (8, 256)):
        counts = sorted(size // rows for size in sizes if size % rows == 0)
        for num_reqs in range(1, limit + 1):
            fitting = next(n for n in counts if n >= num_reqs)
            assert fitting - num_reqs < 16
    assert verify_sizes(own, [(256, 64)], largest=512) == sorted({*own, 256, 512})


def plan(spec: dict[str, Any], asked: dict[str, Any] | None = None, **scheduler: int) -> list[int]:
    """Capture sizes of an engine on a GPU, where vLLM's own are 1 and 512."""
    compilation = SimpleNamespace(cudagraph_capture_sizes=[1, 512], max_cudagraph_capture_size=512)
    limits = {"max_num_seqs": 128, "max_num_batched_tokens": 8192, **scheduler}
    keys = {"auto_budget": False, "num_speculative_tokens_per_batch_size": None, **spec}
    config: Any = SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(**limits),
        speculative_config=SimpleNamespace(**keys),
    )
    arguments: Any = SimpleNamespace(compilation_config=SimpleNamespace(**(asked or {})))
    set_capture_sizes(arguments, config)
    sizes = compilation.cudagraph_capture_sizes
    assert compilation.max_cudagraph_capture_size == sizes[-1]
    return sizes


def test_graphs_are_planned_beyond_vllms_ceiling() -> None:
    assert {32, 64, 128, 2048} <= set(plan({"budget": 31}))
    assert plan({"budget": 31}, max_num_seqs=4)[-1] == 512  # vLLM's own stay
    assert plan({"budget": 31}, max_num_batched_tokens=1024)[-1] == 1024
    schedule = [(1, 4, 31), (5, 300, 7)]
    sizes = set(plan({"budget": 31, "num_speculative_tokens_per_batch_size": schedule}))
    assert {32, 128, 1024} <= sizes and 32 * 40 not in sizes
    assert plan({"budget": 63, "auto_budget": True})[-1] == MAX_AUTO_TOKENS
    assert plan({"budget": 63, "auto_budget": True}, max_num_seqs=2)[-1] == 128


@pytest.mark.parametrize(
    "asked", [{"cudagraph_capture_sizes": [1, 512]}, {"max_cudagraph_capture_size": 512}]
)
def test_the_users_sizes_stay(asked: dict[str, Any]) -> None:
    assert plan({"budget": 31}, asked) == [1, 512]
