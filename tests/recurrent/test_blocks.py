# SPDX-License-Identifier: Apache-2.0
"""Blocks of states: where a step works, and where an accepted path leaves states behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_ddtree.recurrent.blocks import StateBlocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_REQS, COLUMNS = 6, 9


def ints(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def tables(groups: int) -> list[torch.Tensor]:
    """Of different widths, and no block twice."""
    made, first = [], 1
    for group in range(groups):
        shape = (MAX_REQS, COLUMNS + group)
        number = shape[0] * shape[1]
        made.append(ints(np.arange(first, first + number).reshape(shape)))
        first += number
    return made


def test_one_block_a_request() -> None:
    of = tables(2)
    blocks = StateBlocks(of, None, MAX_REQS)
    blocks.use(1)
    blocks.find(ints([7, 400, 31]), 3, 5)
    for group in (0, 1):
        # Padded requests have the null block; those after them are not touched.
        assert blocks.indices[group].tolist() == [*of[group][:3, 0].tolist(), 0, 0, 1]
    assert blocks.moves(ints([1] * 3), ints([2] * 3), ints([2] * 3), 3) is None
    assert blocks.written(3) == {int(t[i, 0]) for t in of for i in range(3)}


@pytest.mark.parametrize("seed", range(20))
def test_a_path_and_a_boundary(seed: int) -> None:
    """Against the definition: the block of the step's last row, and the last boundary on the way.

    Blocks are larger than trees, so a path leads over one boundary at most.
    """
    rng = np.random.default_rng(seed)
    size, of = 16, tables(2)
    for table in of:
        table[1, :4] = 0  # blocks that vLLM has given back
    blocks = StateBlocks(of, size, MAX_REQS)
    prefix = rng.integers(1, size * (COLUMNS - 1), MAX_REQS)
    tail = np.where(rng.random(MAX_REQS) < 0.2, 0, rng.integers(1, size, MAX_REQS))
    path = np.array([rng.integers(1, max(n, 1) + 1) for n in tail])
    seq = np.where(tail > 0, prefix + tail, prefix)
    blocks.find(ints(seq), MAX_REQS, MAX_REQS)
    moves = blocks.moves(ints(np.where(tail > 0, prefix, 0)), ints(tail), ints(path), MAX_REQS)
    assert moves is not None and moves.blocks is blocks.indices
    for req in range(MAX_REQS):
        column = (seq[req] - 1) // size
        for group, table in enumerate(of):
            assert int(blocks.indices[group, req]) == int(table[req, column])
        steps = int(moves.boundary_steps[req])
        boundary = column * size
        on_the_way = tail[req] > 0 and prefix[req] < boundary <= prefix[req] + path[req]
        if on_the_way and int(of[0][req, column - 1]) > 0:
            assert steps == boundary - prefix[req] > 0
            for group, table in enumerate(of):
                assert int(moves.boundary_blocks[group, req]) == int(table[req, column - 1])
        else:
            assert steps == 0


def test_boundaries_are_led_over() -> None:
    """The cases above do occur: before, on and behind a boundary."""
    blocks = StateBlocks(tables(1), 16, MAX_REQS)
    prefix, tail, path = [14, 14, 14, 14, 16, 3], [8] * 5 + [0], [1, 2, 3, 8, 8, 1]
    blocks.find(ints([p + t for p, t in zip(prefix, tail, strict=True)]), 6, 6)
    moves = blocks.moves(ints(prefix), ints(tail), ints(path), 6)
    assert moves is not None
    assert moves.boundary_steps.tolist() == [0, 2, 2, 2, 0, 0]
