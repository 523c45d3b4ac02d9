# SPDX-License-Identifier: Apache-2.0
"""Mamba2 and Kimi delta attention: verify and commit of tree rows against float64 references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.recurrent.cases import Request, Sizes, Step, chain, tree
from tests.recurrent.other_cases import BoundedKDAStep, KDAStep, Mamba2Step
from tests.recurrent.test_kernels import MIXED, check_round

KINDS = pytest.mark.parametrize("kind", [Mamba2Step, KDAStep, BoundedKDAStep])


def small(kind: type[Step], **more: object) -> Sizes:
    heads = 2
    groups = 1 if kind is Mamba2Step else heads
    return Sizes(**{"key_heads": groups, "heads": heads, "key_dim": 16, "value_dim": 16, **more})  # type: ignore[arg-type]


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_batch(kind: type[Step], dtype: torch.dtype) -> None:
    check_round(small(kind, key_dim=64, value_dim=32, dtype=dtype), MIXED, kind=kind, padded=2)


@KINDS
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 33, 64, 65, 100])
def test_tree_sizes(kind: type[Step], num_rows: int) -> None:
    check_round(small(kind), [Request(tree(1, num_rows))], kind=kind, budget=127)


@KINDS
def test_largest_tree(kind: type[Step]) -> None:
    requests = [Request(tree(1, 256, max_depth=31)), Request(tree(2, 70))]
    check_round(small(kind), requests, kind=kind, budget=255)


@KINDS
@pytest.mark.parametrize("num_rows", [2, 32, 80])
def test_chains_are_trees(kind: type[Step], num_rows: int) -> None:
    check_round(small(kind), [Request(chain(num_rows))], kind=kind, budget=127)


@KINDS
@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0, 1000.0])
def test_decays(kind: type[Step], decay: float) -> None:
    check_round(small(kind, decay=decay), [Request(tree(3, 40)), Request(chain(16))], kind=kind)


@KINDS
@pytest.mark.parametrize("size", [(64, 128), (128, 64), (128, 128), (256, 64), (64, 256)])
def test_sizes_of_heads(kind: type[Step], size: tuple[int, int]) -> None:
    key_dim, value_dim = size
    sizes = small(kind, key_dim=key_dim, value_dim=value_dim)
    check_round(sizes, [Request(tree(3, 12)), Request(tree(4, 5))], kind=kind)


@KINDS
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_state_dtypes(kind: type[Step], state_dtype: torch.dtype) -> None:
    sizes = small(kind, dtype=torch.bfloat16, state_dtype=state_dtype)
    check_round(sizes, [Request(tree(3, 12)), Request(tree(4, 5))], kind=kind)


@KINDS
@pytest.mark.parametrize("seed", range(6))
def test_random_batches(kind: type[Step], seed: int) -> None:
    """Any heads, widths, decays and batches."""
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 4))
    sizes = Sizes(
        groups,
        groups * (int(rng.integers(1, 4)) if kind is Mamba2Step else 1),
        key_dim=int(rng.choice([16, 32, 40, 64])),
        value_dim=int(rng.choice([16, 32, 48, 64])),
        width=int(rng.integers(2, 6)),
        bias=bool(rng.integers(2)),
        dtype=(torch.float32, torch.bfloat16)[rng.integers(2)],
        state_dtype=(torch.float32, torch.bfloat16)[rng.integers(2)],
        decay=float(rng.choice([0.0, 0.01, 1.0, 50.0])),
    )
    lens = rng.integers(0, rng.choice([4, 20, 100]), int(rng.integers(1, 6)))
    requests = [
        Request(tree(i, size, int(rng.integers(1, 32))) if size else (), int(rng.integers(0, 4)))
        for i, size in enumerate(lens.tolist())
    ]
    padded = int(rng.integers(3))
    check_round(sizes, [*requests, Request([-1])], seed, kind, padded=padded, budget=127)


@KINDS
def test_value_blocks(kind: type[Step]) -> None:
    """Each block of value columns gives what one block of all gives."""
    sizes = small(kind, value_dim=64)
    step = kind(sizes, [Request(tree(2, 70))], budget=127)
    layer = step.make_layer(sizes, step.num_blocks, 0)
    step.prepare()
    qkv = step.convolve(layer)
    whole, parts = step.verify(layer, qkv, block_v=64), step.verify(layer, qkv, block_v=16)
    rows = step.tree_rows(0)
    torch.testing.assert_close(parts[rows], whole[rows], rtol=1e-5, atol=1e-5)


@KINDS
def test_layers_commit_in_one_launch(kind: type[Step]) -> None:
    sizes = small(kind)
    step = kind(sizes, [Request(tree(1, 9)), Request((), before=2)], layers=2)
    layers = [step.make_layer(sizes, step.num_blocks, seed) for seed in range(2)]
    wanted = []
    step.prepare()
    for index, layer in enumerate(layers):
        step.verify(layer, step.convolve(layer, index), index)
        wanted.append(step.reference(layer, 0, index)[2])
    path = [0, *(row for row, parent in enumerate(step.requests[0].parents) if parent == 0)][:2]
    step.commit(layers, [path, []], groups=[0, 0])
    for layer, states in zip(layers, wanted, strict=True):
        got = layer.states[step.blocks[0]].double()
        torch.testing.assert_close(got, states[path[-1]], rtol=2e-5, atol=2e-5)


def test_refusals() -> None:
    sizes = small(KDAStep)
    step = KDAStep(sizes, [Request(tree(1, 40))])
    layer = step.make_layer(sizes, step.num_blocks, 0)
    qkv = step.inputs[0]
    with pytest.raises(ValueError, match="4 key heads"):
        KDAStep.make_layer(small(KDAStep, key_heads=4, heads=8), 4, 0)
    step.scratch.scores = step.scratch.scores[..., :32]
    with pytest.raises(ValueError, match="40 tree rows"):
        step.verify(layer, qkv)
    mamba = Mamba2Step(sizes, [Request(tree(1, 40))], budget=39)
    mamba.masks = mamba.masks[:, :1]
    with pytest.raises(ValueError, match="need 2 mask words"):
        mamba.verify(mamba.make_layer(sizes, mamba.num_blocks, 0), mamba.inputs[0])
