# SPDX-License-Identifier: Apache-2.0
"""Convolution, verify and commit of tree rows against the reference in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.recurrent.cases import Request, Sizes, Step, chain, make_layer, path_to, tree
from vllm_ddtree.recurrent import reference
from vllm_ddtree.recurrent.commit import BlockMoves, StateCommit
from vllm_ddtree.recurrent.rows import RecurrentRows
from vllm_ddtree.recurrent.verify import tree_delta_rule

MIXED = [
    Request(tree(0, 20), before=3),
    Request((), before=5),
    Request(tree(1, 7)),
    Request((), before=1),
    Request(chain(9), before=0),
    Request([-1]),
]
"""Trees of many sizes beside prefill, plain decoding and a root alone."""

ATOL = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def check_round(
    sizes: Sizes,
    requests: list[Request],
    seed: int = 0,
    kind: type[Step] = Step,
    **kwargs: int,
) -> None:
    """One round of a layer, from the rows to the commit; kwargs go to `kind`."""
    step = kind(sizes, requests, seed, **kwargs)
    layer = step.make_layer(sizes, step.num_blocks, seed)
    before = layer.states.clone(), layer.conv_states.clone()
    atol, rng = ATOL[sizes.dtype], np.random.default_rng(seed)
    paths = [
        path_to(r.parents, int(rng.integers(len(r.parents)))) if r.parents else [] for r in requests
    ]

    step.prepare()
    qkv = step.convolve(layer)
    expected = [step.reference(layer, req) if r.parents else None for req, r in enumerate(requests)]
    out = step.verify(layer, qkv)
    assert qkv[~step.in_tree].isnan().all(), "rows outside trees were written"
    assert out[~step.in_tree].isnan().all(), "rows outside trees were written"
    torch.testing.assert_close(layer.states, before[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(layer.conv_states, before[1], rtol=0, atol=0, equal_nan=True)
    step.commit([layer], paths)

    for req, (block, wanted) in enumerate(zip(step.blocks, expected, strict=True)):
        if wanted is None:
            continue
        rows = step.tree_rows(req)
        torch.testing.assert_close(qkv[rows].double(), wanted[0], rtol=atol, atol=atol)
        torch.testing.assert_close(out[rows].double(), wanted[1], rtol=atol, atol=atol)
        state = layer.states[block].double()
        state_atol = max(atol, ATOL[sizes.state_dtype])
        torch.testing.assert_close(
            state, wanted[2][paths[req][-1]], rtol=state_atol, atol=state_atol
        )
        history = layer.conv_states[block].T
        committed = reference.commit_history(
            wanted[3].to(sizes.dtype), paths[req], before[1][block].T[: sizes.width - 1]
        )
        torch.testing.assert_close(history[: sizes.width - 1], committed, rtol=0, atol=0)
    # Nobody else's state moves, nor does the null block's.
    moved = [step.blocks[req] for req, path in enumerate(paths) if path]
    kept = [block for block in range(step.num_blocks) if block not in moved]
    for now, then in zip((layer.states, layer.conv_states), before, strict=True):
        torch.testing.assert_close(now[kept], then[kept], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_batch(dtype: torch.dtype) -> None:
    check_round(Sizes(dtype=dtype), MIXED, padded=2)


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 100])
def test_tree_sizes(num_rows: int) -> None:
    check_round(Sizes(key_dim=16, value_dim=16), [Request(tree(1, num_rows))], budget=127)


def test_largest_tree() -> None:
    sizes = Sizes(heads=1, key_dim=16, value_dim=16)
    requests = [Request(tree(1, 256, max_depth=31)), Request(tree(2, 70))]
    check_round(sizes, requests, budget=255)


@pytest.mark.parametrize("num_rows", [2, 9, 32, 80])
def test_chains_are_trees(num_rows: int) -> None:
    check_round(Sizes(key_dim=16, value_dim=16), [Request(chain(num_rows))], budget=127)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "key_heads", "heads"),
    [(128, 128, 1, 2), (256, 256, 1, 1), (64, 256, 2, 2), (96, 80, 1, 3), (8, 24, 2, 4)],
)
def test_heads(key_dim: int, value_dim: int, key_heads: int, heads: int) -> None:
    sizes = Sizes(key_heads, heads, key_dim, value_dim)
    check_round(sizes, [Request(tree(3, 20)), Request(tree(4, 9))])


@pytest.mark.parametrize("seed", range(24))
def test_random_batches(seed: int) -> None:
    """Any heads, widths, decays and batches."""
    rng = np.random.default_rng(seed)
    key_heads = int(rng.integers(1, 4))
    sizes = Sizes(
        key_heads,
        key_heads * int(rng.integers(1, 4)),
        key_dim=int(rng.choice([16, 32, 40, 64])),
        value_dim=int(rng.choice([16, 32, 48, 64])),
        width=int(rng.integers(2, 6)),
        bias=bool(rng.integers(2)),
        dtype=(torch.float32, torch.bfloat16)[rng.integers(2)],
        state_dtype=(torch.float32, torch.bfloat16)[rng.integers(2)],
        decay=float(rng.choice([0.0, 0.01, 1.0, 50.0])),
    )
    sizes_of_trees = rng.integers(0, rng.choice([4, 20, 100]), int(rng.integers(1, 7)))
    requests = [
        Request(tree(i, size, int(rng.integers(1, 32))) if size else (), int(rng.integers(0, 4)))
        for i, size in enumerate(sizes_of_trees.tolist())
    ]
    check_round(sizes, [*requests, Request([-1])], seed, padded=int(rng.integers(3)), budget=127)


@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0, 1000.0])
def test_decays(decay: float) -> None:
    sizes = Sizes(key_dim=16, value_dim=16, decay=decay)
    check_round(sizes, [Request(tree(3, 40)), Request(chain(16))])


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_convolutions(width: int, bias: bool) -> None:
    sizes = Sizes(key_dim=16, value_dim=16, width=width, bias=bias)
    check_round(sizes, [Request(tree(3, 12)), Request([-1]), Request(chain(2))])


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_state_dtypes(state_dtype: torch.dtype) -> None:
    sizes = Sizes(key_dim=16, value_dim=16, dtype=torch.bfloat16, state_dtype=state_dtype)
    check_round(sizes, [Request(tree(3, 12)), Request(tree(4, 5))])


def test_many_requests() -> None:
    sizes = Sizes(heads=1, key_dim=16, value_dim=16)
    requests = [Request(tree(i, 1 + i % 7), before=i % 3) for i in range(24)]
    check_round(sizes, requests, padded=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_keys(dtype: torch.dtype) -> None:
    """A text that repeats one token: all rows have one key, and beta is near 1. An expansion in
    powers would cancel numbers of the size of binomials here."""
    sizes = Sizes(heads=1, key_dim=16, value_dim=16, decay=0.0, dtype=dtype)
    step = Step(sizes, [Request(chain(32))])
    layer = make_layer(sizes, step.num_blocks, 0)
    layer.conv_states[:] = 1.0
    layer.conv_weight[:] = 0.3
    step.inputs[:, :] = 1.0
    step.b[:] = 12.0
    step.prepare()
    out = step.verify(layer, step.convolve(layer))
    wanted = step.reference(layer, 0)[1]
    atol = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out[step.tree_rows(0)].double(), wanted, rtol=atol, atol=atol)


@pytest.mark.parametrize("block_v", [16, 32, 64])
def test_value_blocks(block_v: int) -> None:
    """Each block of value columns gives what one block of all gives."""
    sizes = Sizes(heads=1, key_dim=16, value_dim=64)
    step = Step(sizes, [Request(tree(2, 70))], budget=127)
    layer = make_layer(sizes, step.num_blocks, 0)
    step.prepare()
    qkv = step.convolve(layer)
    whole, parts = step.verify(layer, qkv, block_v=64), step.verify(layer, qkv, block_v=block_v)
    rows = step.tree_rows(0)
    torch.testing.assert_close(parts[rows], whole[rows], rtol=1e-5, atol=1e-5)


def test_layers_commit_in_one_launch() -> None:
    """Three layers in two groups, each of which has blocks of its own."""
    sizes = Sizes(heads=1, key_dim=16, value_dim=16)
    step = Step(sizes, [Request(tree(1, 9)), Request((), before=2), Request(tree(2, 5))], layers=3)
    layers, groups = [make_layer(sizes, step.num_blocks, seed) for seed in range(3)], [0, 1, 0]
    paths = [path_to(step.requests[0].parents, 8), [], path_to(step.requests[2].parents, 3)]
    blocks = torch.tensor([[1, 2, 3], [5, 1, 2]], dtype=torch.int32)
    step.prepare()
    wanted = []
    for index, (layer, group) in enumerate(zip(layers, groups, strict=True)):
        step.state_indices, step.blocks = blocks[group], blocks[group].tolist()
        step.verify(layer, step.convolve(layer, index), index)
        wanted.append([step.reference(layer, req, index)[2][paths[req][-1]] for req in (0, 2)])
    step.commit(layers, paths, groups, blocks)
    for layer, group, states in zip(layers, groups, wanted, strict=True):
        for req, state in zip((0, 2), states, strict=True):
            got = layer.states[blocks[group, req]].double()
            torch.testing.assert_close(got, state, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("boundary", [0, 1, 2, 4, 5])
def test_states_at_block_boundaries(boundary: int) -> None:
    """The states behind a path go to another block, those at a step of the path to a third."""
    sizes = Sizes(heads=1, key_dim=16, value_dim=16)
    step = Step(sizes, [Request(chain(7)), Request(tree(1, 6))])
    step.blocks, step.state_indices[:] = [1, 2], torch.tensor([1, 2], dtype=torch.int32)
    layer = make_layer(sizes, 8, 0)
    before = [layer.states.clone(), layer.conv_states.clone()]
    paths = [[0, 1, 2, 3, 4], [0]]
    step.prepare()
    step.convolve(layer)
    wanted = [step.reference(layer, req) for req in (0, 1)]
    moves = BlockMoves(
        blocks=torch.tensor([[3, 2]], dtype=torch.int32),
        boundary_steps=torch.tensor([boundary, 0], dtype=torch.int32),
        boundary_blocks=torch.tensor([[4, 7]], dtype=torch.int32),
    )
    step.commit([layer], paths, moves=moves)
    expected = {(3, 0, 4), (2, 1, 0)} | ({(4, 0, boundary - 1)} if boundary else set())
    for block, req, row in expected:
        state = layer.states[block].double()
        torch.testing.assert_close(state, wanted[req][2][row], rtol=2e-5, atol=2e-5)
        path, history = paths[req][: row + 1], before[1][step.blocks[req]].T[: sizes.width - 1]
        committed = reference.commit_history(wanted[req][3].float(), path, history)
        got = layer.conv_states[block].T[: sizes.width - 1]
        torch.testing.assert_close(got, committed, rtol=0, atol=0)
    kept = [block for block in range(8) if block not in {block for block, _, _ in expected}]
    for now, then in zip((layer.states, layer.conv_states), before, strict=True):
        torch.testing.assert_close(now[kept], then[kept], rtol=0, atol=0, equal_nan=True)


def test_rows_and_taps() -> None:
    step = Step(Sizes(width=4), MIXED)
    step.prepare()
    assert step.rows.starts.tolist() == [0, 20, 20, 27, 27, 36]
    for req, request in enumerate(MIXED):
        first = int(step.rows.starts[req])
        taps = step.rows.taps[first : first + len(request.parents)].tolist()
        assert taps == reference.conv_taps(list(request.parents), 4)


def test_too_many_rows() -> None:
    step = Step(Sizes(), MIXED)
    step.rows = RecurrentRows(step.num_tree_rows - 1, step.num_reqs, 4, step.masks.device)
    with pytest.raises(ValueError, match="exceed the 36 that"):
        step.prepare()


def test_blocks_beyond_32_bits() -> None:
    """Block 2 of states with 2**30 elements a block starts at element 2**31.

    Only the pages of that block are ever touched, so the states cost address space alone.
    """
    sizes = Sizes(heads=1, key_dim=16, value_dim=16, state_dtype=torch.bfloat16)
    step = Step(sizes, [Request(tree(1, 9))])
    step.blocks, step.state_indices[:] = [2], 2
    near = make_layer(sizes, 4, 0)
    storage = torch.empty(2 * 2**30 + 256, dtype=torch.bfloat16)
    states = storage.as_strided((3, 1, 16, 16), (2**30, 256, 16, 1))
    states[2] = near.states[2]
    far = dataclasses.replace(near, states=states)
    wanted = step.reference(near, 0)
    path = path_to(step.requests[0].parents, 8)
    step.prepare()
    out = step.verify(far, step.convolve(far))
    step.commit([far], [path])
    torch.testing.assert_close(out[step.tree_rows(0)].double(), wanted[1], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(states[2].double(), wanted[2][path[-1]], rtol=2e-2, atol=2e-2)


def test_refusals() -> None:
    sizes = Sizes(heads=1, key_dim=16, value_dim=16)
    step = Step(sizes, [Request(tree(1, 70))], budget=127)
    layer, other = make_layer(sizes, 4, 0), make_layer(dataclasses.replace(sizes, heads=2), 4, 0)
    with pytest.raises(ValueError, match="need scratch"):
        tree_delta_rule(
            layer, step.tree_step, step.inputs[0], step.stash[0].gates, torch.empty(73, 1, 16)
        )
    with pytest.raises(ValueError, match="one dtype"):
        step.convolve(dataclasses.replace(layer, conv_states=layer.conv_states.half()))
    with pytest.raises(ValueError, match="width of 4, not 3"):
        step.convolve(make_layer(dataclasses.replace(sizes, width=3), 4, 0))
    with pytest.raises(ValueError, match="must agree"):
        StateCommit([layer, other], step.stash, [0, 0])
    with pytest.raises(ValueError, match="for 2 layers"):
        StateCommit([layer, layer], step.stash, [0, 0])
    with pytest.raises(ValueError, match="have 48 channels, the convolution has 64"):
        dataclasses.replace(layer, conv_weight=other.conv_weight[:64])
    with pytest.raises(ValueError, match="do not divide"):
        make_layer(dataclasses.replace(sizes, heads=3, key_heads=2), 4, 0)
