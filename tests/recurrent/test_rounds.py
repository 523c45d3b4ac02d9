# SPDX-License-Identifier: Apache-2.0
"""Many rounds: trees, accepted paths and commits give what plain decoding gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.recurrent.cases import Request, Sizes, Step, chain, make_layer, path_to
from vllm_ddtree.recurrent import reference
from vllm_ddtree.recurrent.layer import RecurrentLayer

SIZES = Sizes(heads=1, key_dim=16, value_dim=16)


def random_round(rng: np.random.Generator, longest: int) -> tuple[list[int], list[int]]:
    """Parents of a tree, and the path that is accepted: nodes beside the path lead astray."""
    parents, path = [-1], [0]
    for _ in range(int(rng.integers(0, longest))):
        for _ in range(int(rng.integers(0, 2))):
            parents.append(int(rng.integers(len(parents))))
        path.append(len(parents))
        parents.append(path[-2])
    return parents, path


class Decoding:
    """One request's plain decoding, token by token, in float64."""

    def __init__(self, layer: RecurrentLayer, block: int) -> None:
        self.layer, self.block = layer, block
        self.history = layer.conv_states[block].T[: layer.width - 1].double()
        self.state = layer.states[block].double()

    def decode(self, step: Step, req: int, path: list[int]) -> torch.Tensor:
        """Outputs of the path's rows, after which the states have moved on."""
        s, layer = step.sizes, self.layer
        rows = torch.tensor(path) + step.root(req)
        inputs, parents = step.inputs[0, rows].double(), chain(len(path))
        weight = layer.conv_weight.double()
        qkv = reference.short_conv(inputs, weight, None, self.history, parents)
        q, k, v = reference.delta_inputs(qkv, s.key_heads, s.heads, s.key_dim, s.value_dim)
        a, b = step.a[0, rows].double(), step.b[0, rows].double()
        g = reference.log_decays(a, layer.A_log.double(), layer.dt_bias.double())
        out, states = reference.sequential(q, k, v, g, b.sigmoid(), parents, self.state)
        self.history = reference.commit_history(inputs, list(range(len(path))), self.history)
        self.state = states[-1]
        return out


def check_state(decoding: Decoding) -> None:
    layer, block = decoding.layer, decoding.block
    torch.testing.assert_close(layer.states[block].double(), decoding.state, rtol=1e-4, atol=1e-4)
    history = layer.conv_states[block].T[: layer.width - 1].double()
    torch.testing.assert_close(history, decoding.history, rtol=0, atol=0)


def test_ten_thousand_tokens() -> None:
    """Errors do not add up, with a state that forgets slowly."""
    sizes = Sizes(heads=1, key_dim=16, value_dim=16, decay=0.02)
    rng, tokens, rounds = np.random.default_rng(0), 0, 0
    layer = make_layer(sizes, 4, 0)
    decoding = Decoding(layer, 1)
    while tokens < 10_000:
        # The interpreter takes its time: most rounds accept a long chain as if it was verified.
        verified = rounds % 16 == 0
        parents, path = random_round(rng, 20) if verified else (chain(32), list(range(32)))
        step = Step(sizes, [Request(parents)], seed=rounds)
        step.state_indices[:] = 1
        out = None
        if verified:
            step.prepare()
            out = step.verify(layer, step.convolve(layer))
        else:
            step.fill_stash(layer, 0)
        step.commit([layer], [path])
        wanted = decoding.decode(step, 0, path)
        if out is not None:
            rows = torch.tensor(path) + step.root(0)
            torch.testing.assert_close(out[rows].double(), wanted, rtol=1e-4, atol=1e-4)
            check_state(decoding)
        tokens, rounds = tokens + len(path), rounds + 1
    check_state(decoding)


def test_requests_come_and_go() -> None:
    """Every round another set of requests verifies trees; the others' states stay."""
    rng, num_blocks = np.random.default_rng(1), 6
    layer = make_layer(SIZES, num_blocks, 0)
    requests = {block: Decoding(layer, block) for block in range(1, num_blocks)}
    for number in range(30):
        order = rng.permutation(list(requests))
        verifying = int(rng.integers(1, len(order) + 1))
        rounds = [random_round(rng, 6) if i < verifying else ([], []) for i in range(len(order))]
        step = Step(SIZES, [Request(parents) for parents, _ in rounds], seed=number)
        step.state_indices = torch.tensor(order, dtype=torch.int32)
        step.prepare()
        out = step.verify(layer, step.convolve(layer))
        step.commit([layer], [path for _, path in rounds])
        for req, block in enumerate(order[:verifying].tolist()):
            path = rounds[req][1]
            wanted = requests[block].decode(step, req, path)
            rows = torch.tensor(path) + step.root(req)
            torch.testing.assert_close(out[rows].double(), wanted, rtol=1e-4, atol=1e-4)
        for decoding in requests.values():
            check_state(decoding)


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_changes_nothing(seed: int) -> None:
    """The rows of a path have the same outputs alone (as a chain) and amid other branches."""
    rng = np.random.default_rng(seed)
    parents, path = random_round(rng, 8)
    leaf = int(rng.integers(len(parents)))
    path = path_to(parents, leaf)
    whole = Step(SIZES, [Request(parents)], seed)
    layer = make_layer(SIZES, 4, seed)
    whole.state_indices[:] = 1
    whole.prepare()
    out = whole.verify(layer, whole.convolve(layer))
    alone = Step(SIZES, [Request(chain(len(path)))], seed)
    alone.state_indices[:] = 1
    for name in ("inputs", "a", "b"):
        rows = getattr(whole, name)[:, torch.tensor(path) + whole.root(0)]
        getattr(alone, name)[:, alone.tree_rows(0)] = rows
    alone.prepare()
    got = alone.verify(layer, alone.convolve(layer))
    rows = torch.tensor(path) + whole.root(0)
    torch.testing.assert_close(got[alone.tree_rows(0)], out[rows], rtol=1e-5, atol=1e-5)
