# SPDX-License-Identifier: Apache-2.0
"""The kernel moves the accepted path's keys and values, and leaves every other byte as it is."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from vllm_ddtree.commit.kv import KVCompactor, make_compactors, with_heads
from vllm_ddtree.round.paths import Paths

BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS = 4, 60, 2

LAYOUTS = ["heads first", "slots first", "gaps"]


def make_cache(layout: str, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A cache [NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, columns] of random bits."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS)
    if layout == "heads first":
        shape = (NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE)
    padding = 8 if layout == "gaps" else 0
    size = torch.empty(0, dtype=dtype).element_size()
    torch.manual_seed(seed)
    bits = torch.randint(0, 256, (*shape, (columns + padding) * size), dtype=torch.uint8)
    cache = bits.view(dtype)[..., :columns]
    return cache if layout == "heads first" else cache.transpose(1, 2)


def as_bytes(cache: torch.Tensor) -> np.ndarray:
    """A copy of the cache's bits: NaN must compare equal to itself."""
    return cache.contiguous().view(torch.uint8).cpu().numpy().copy()


def random_path(rng: np.random.Generator, tail_len: int, length: int) -> list[int]:
    """Strictly ascending tree rows that start at the root."""
    return [0, *sorted(rng.choice(np.arange(1, tail_len), length - 1, replace=False).tolist())]


class Commit:
    """Arguments of ``compact`` for requests (rows before the tree, tree rows, path)."""

    def __init__(
        self, requests: Sequence[tuple[int, int, list[int]]], seed: int = 0, max_path: int = 16
    ) -> None:
        lens = [before + tail_len for before, tail_len, _ in requests]
        num_rows = sum(lens) + 3  # padding rows, without slots
        slots = np.random.default_rng(seed).permutation(NUM_BLOCKS * BLOCK_SIZE)[:num_rows]
        slots[sum(lens) :] = -1
        self.slot_mapping = torch.tensor(slots)
        self.starts = torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32)
        self.tail_lens = torch.tensor([n for _, n, _ in requests], dtype=torch.int32)
        # What lies behind a path is whatever an earlier round left there.
        self.paths = Paths.empty(len(requests), max_path - 1, 0, torch.get_default_device())
        self.paths.rows.fill_(1)
        for req, (_, _, path) in enumerate(requests):
            self.paths.rows[req, : len(path)] = torch.tensor(path)
            self.paths.lens[req] = len(path)

    def run(self, compactor: KVCompactor) -> None:
        compactor.compact(
            self.slot_mapping,
            self.starts,
            self.tail_lens,
            self.paths,
            len(self.tail_lens),
        )

    def expected(self, cache: torch.Tensor) -> np.ndarray:
        """The cache afterwards: every row of the new tree is read from the old cache."""
        old = as_bytes(cache)
        new = old.copy()
        for req, tail_len in enumerate(self.tail_lens.tolist()):
            if tail_len == 0:
                continue
            root = int(self.starts[req + 1]) - tail_len
            for j, row in enumerate(self.paths.rows[req, : self.paths.lens[req]].tolist()):
                source, target = self.slot_mapping[[root + row, root + j]].tolist()
                if source >= 0 and target >= 0:
                    new[target // BLOCK_SIZE, :, target % BLOCK_SIZE] = old[
                        source // BLOCK_SIZE, :, source % BLOCK_SIZE
                    ]
        return new


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_paths_move_to_the_front(layout: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    lengths = [(0, 9, 4), (5, 32, 16), (0, 17, 1), (0, 2, 2), (3, 40, 12)]
    requests = [(before, n, random_path(rng, n, length)) for before, n, length in lengths]
    requests.insert(2, (6, 0, [0, 3]))  # no tree: what its path says must not matter
    commit = Commit(requests)
    caches = [make_cache(layout, 24, dtype, seed) for seed in range(3)]
    expected = [commit.expected(cache) for cache in caches]
    assert all((e != as_bytes(c)).any() for e, c in zip(expected, caches, strict=True))
    commit.run(KVCompactor(caches))
    for cache, want in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(as_bytes(cache), want)


@pytest.mark.parametrize("seed", range(8))
def test_random_paths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(int(rng.integers(1, 6))):
        tail_len = int(rng.integers(2, 40))
        length = int(rng.integers(1, min(tail_len, 16) + 1))
        requests.append((int(rng.integers(0, 4)), tail_len, random_path(rng, tail_len, length)))
    commit = Commit(requests, seed)
    cache = make_cache("heads first", 16, torch.float16, seed)
    expected = commit.expected(cache)
    commit.run(KVCompactor([cache]))
    np.testing.assert_array_equal(as_bytes(cache), expected)


@pytest.mark.parametrize(
    "path",
    [
        [0, 2, 4, 6],  # row 2 is read for row 1, then overwritten by row 4
        [0, 1, 3, 5, 6, 7],
        list(range(0, 40, 2)),  # the same across blocks of path rows
        [0, *range(2, 40)],  # every row moves up by one
        [0, *range(1, 17), *range(18, 30)],  # only the second block moves
    ],
)
def test_a_source_may_be_a_later_destination(path: list[int]) -> None:
    commit = Commit([(1, 40, path)], max_path=40)
    cache = make_cache("slots first", 16, torch.float32, 0)
    expected = commit.expected(cache)
    commit.run(KVCompactor([cache]))
    np.testing.assert_array_equal(as_bytes(cache), expected)


def test_identity_paths_write_nothing() -> None:
    commit = Commit([(0, 9, list(range(9))), (2, 5, [0]), (1, 6, [0, 1, 2])])
    cache = make_cache("heads first", 16, torch.float32, 0)
    before = as_bytes(cache)
    commit.run(KVCompactor([cache]))
    np.testing.assert_array_equal(as_bytes(cache), before)


def test_rows_without_a_slot_are_left_alone() -> None:
    commit = Commit([(0, 12, [0, 3, 5, 9, 11])])
    commit.slot_mapping[[3, 2]] = -1  # source of row 1, destination of row 5
    cache = make_cache("heads first", 16, torch.float32, 0)
    expected = commit.expected(cache)
    assert (expected != as_bytes(cache)).any()
    commit.run(KVCompactor([cache]))
    np.testing.assert_array_equal(as_bytes(cache), expected)


def test_a_group_of_several_layouts() -> None:
    """Layers of one KV group may differ in heads, head size and strides; each moves once."""
    commit = Commit([(0, 9, [0, 3, 5]), (2, 12, [0, 1, 4, 7])])
    caches = [
        make_cache("heads first", 16, torch.float32, 0),
        make_cache("heads first", 24, torch.float32, 1),
        make_cache("slots first", 16, torch.float32, 2),
        make_cache("heads first", 16, torch.float32, 3),
    ]
    expected = [commit.expected(cache) for cache in caches]
    compactors = make_compactors(caches)
    assert [len(compactor.caches) for compactor in compactors] == [2, 1, 1]
    for compactor in compactors:
        commit.run(compactor)
    for cache, want in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(as_bytes(cache), want)
    assert make_compactors([]) == []


def test_latent_caches() -> None:
    """[num_blocks, block_size, rank + rope], whose pages may be longer than their rows."""
    commit = Commit([(0, 9, [0, 3, 5]), (2, 12, [0, 1, 4, 7])])
    pages = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_SIZE * 576 + 64), dtype=torch.int16)
    latent = pages[:, : BLOCK_SIZE * 576].view(torch.bfloat16).unflatten(1, (BLOCK_SIZE, 576))
    cache = with_heads(latent)
    assert cache.shape == (NUM_BLOCKS, 1, BLOCK_SIZE, 576)
    behind = pages[:, BLOCK_SIZE * 576 :].clone()
    expected = commit.expected(cache)
    assert (expected != as_bytes(cache)).any()
    (compactor,) = make_compactors([cache])
    commit.run(compactor)
    np.testing.assert_array_equal(as_bytes(cache), expected)
    torch.testing.assert_close(pages[:, BLOCK_SIZE * 576 :], behind)
    assert with_heads(cache) is cache


def test_a_shared_cache_moves_once() -> None:
    """Moved twice, row 4 would come from row 6 instead of its own content."""
    commit = Commit([(0, 9, [0, 2, 4, 6])])
    caches = [make_cache("heads first", 16, torch.float32, seed) for seed in range(2)]
    expected = [commit.expected(cache) for cache in caches]
    compactor = KVCompactor([caches[0], caches[1], caches[0], caches[1].view(torch.float32)])
    assert len(compactor.caches) == 2
    commit.run(compactor)
    for cache, want in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(as_bytes(cache), want)


def test_groups_have_their_own_slots_and_shapes() -> None:
    requests = [(0, 9, [0, 2, 4, 6]), (1, 7, [0, 5])]
    commits = [Commit(requests, seed) for seed in range(2)]
    caches = [
        make_cache("heads first", 16, torch.float32, 0),
        make_cache("slots first", 10, torch.bfloat16, 1),
    ]
    expected = [commit.expected(cache) for commit, cache in zip(commits, caches, strict=True)]
    for commit, cache in zip(commits, caches, strict=True):
        commit.run(KVCompactor([cache]))
    for cache, want in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(as_bytes(cache), want)


@pytest.mark.parametrize(
    ("columns", "offset", "word"), [(24, 0, 8), (24, 4, 4), (10, 0, 2), (9, 0, 1), (24, 1, 1)]
)
def test_odd_sizes_and_addresses(columns: int, offset: int, word: int) -> None:
    """Words never straddle a row nor lie across an alignment."""
    storage = torch.zeros(NUM_BLOCKS * NUM_HEADS * BLOCK_SIZE * columns + 16, dtype=torch.uint8)
    offset += -storage.data_ptr() % 8
    strides = (NUM_HEADS * BLOCK_SIZE * columns, BLOCK_SIZE * columns, columns, 1)
    cache = storage.as_strided((NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, columns), strides, offset)
    cache.copy_(make_cache("heads first", columns, torch.uint8, 0))
    commit = Commit([(0, 9, [0, 2, 4, 6])])
    expected = commit.expected(cache)
    compactor = KVCompactor([cache])
    assert compactor.word_size == word
    commit.run(compactor)
    np.testing.assert_array_equal(as_bytes(cache), expected)


def test_offsets_beyond_32_bits() -> None:
    """Block 4 of a cache with 2**30 words a block starts at word 2**32.

    Only the pages of that block are ever touched, so the cache costs address space alone.
    """
    stride = 2**30
    storage = torch.empty(4 * stride + 64, dtype=torch.uint8)
    cache = storage.as_strided((5, 1, 4, 9), (stride, 36, 9, 1))
    cache[4] = torch.arange(36, dtype=torch.uint8).view(1, 4, 9)
    content = cache[4].clone()
    paths = Paths(
        torch.tensor([[0, 2, 3]], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        torch.arange(4),
    )
    compactor = KVCompactor([cache])
    compactor.compact(
        torch.tensor([16, 17, 18, 19]),
        torch.tensor([0, 4], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
        paths,
        1,
    )
    content[0, 1:3] = content[0, 2:4].clone()
    torch.testing.assert_close(cache[4], content, rtol=0, atol=0)


def test_no_requests() -> None:
    commit = Commit([(0, 9, [0, 2, 4, 6])])
    cache = make_cache("heads first", 16, torch.float32, 0)
    before = as_bytes(cache)
    commit.tail_lens = commit.tail_lens[:0]
    commit.run(KVCompactor([cache]))
    np.testing.assert_array_equal(as_bytes(cache), before)


@pytest.mark.parametrize(
    "caches",
    [
        [],
        [torch.zeros(2, 2, 4)],
        [torch.zeros(2, 2, 4, 8).transpose(2, 3)],
        [torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 16)],
        [torch.zeros(2, 2, 4, 8), torch.zeros(2, 4, 2, 8).transpose(1, 2)],
        [torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 8, dtype=torch.int32)],
    ],
    ids=["none", "three dims", "not contiguous", "shapes", "strides", "dtypes"],
)
def test_caches_that_do_not_fit_together_are_refused(caches: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="cache"):
        KVCompactor(caches)
