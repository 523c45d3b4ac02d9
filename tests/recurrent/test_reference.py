# SPDX-License-Identifier: Apache-2.0
"""The forms of the reference agree with each other, in float64 to rounding."""

import numpy as np
import pytest
import torch

from tests.attention.tree_cases import ancestor_sets, pack_masks
from tests.recurrent.cases import chain, path_to, tree
from vllm_ddtree.attention.kernels.reference import ancestor_mask
from vllm_ddtree.recurrent import reference


def random_inputs(num_rows: int, heads: int, key_dim: int, value_dim: int, decay: float) -> tuple:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    q, k = normal(num_rows, heads, key_dim), reference.normalize(normal(num_rows, heads, key_dim))
    g = -decay * torch.rand(num_rows, heads, dtype=torch.float64)
    beta = torch.rand(num_rows, heads, dtype=torch.float64)
    state = normal(heads, value_dim, key_dim)
    return q, k, normal(num_rows, heads, value_dim), g, beta, state


def ancestors_of(parents: list[int]) -> torch.Tensor:
    words = (len(parents) + 31) // 32
    return ancestor_mask(pack_masks(ancestor_sets(np.array(parents)), words), len(parents))


@pytest.mark.parametrize("decay", [0.0, 0.1, 3.0, 200.0])
@pytest.mark.parametrize("seed", range(5))
def test_chunk_is_the_recurrence(seed: int, decay: float) -> None:
    torch.manual_seed(seed)
    parents = tree(seed, int(torch.randint(1, 257, ())), max_depth=31)
    q, k, v, g, beta, state = random_inputs(len(parents), 2, 16, 24, decay)
    out, states = reference.sequential(q, k, v, g, beta, parents, state)
    got, u, total = reference.chunk(q, k, v, g, beta, ancestors_of(parents), state)
    torch.testing.assert_close(got, out, rtol=0, atol=1e-12)
    for row in {0, len(parents) // 2, len(parents) - 1}:
        committed = reference.commit_state(k, u, total, path_to(parents, row), state)
        torch.testing.assert_close(committed, states[row], rtol=0, atol=1e-12)


def test_a_path_is_a_chain() -> None:
    torch.manual_seed(0)
    parents = tree(3, 40)
    q, k, v, g, beta, state = random_inputs(40, 1, 8, 8, 0.5)
    out, states = reference.sequential(q, k, v, g, beta, parents, state)
    path = path_to(parents, 39)
    alone = reference.sequential(
        q[path], k[path], v[path], g[path], beta[path], chain(len(path)), state
    )
    torch.testing.assert_close(alone[0], out[path], rtol=0, atol=0)
    torch.testing.assert_close(alone[1], states[path], rtol=0, atol=0)


def test_taps() -> None:
    assert reference.conv_taps([-1, 0, 1, 0, 3, 4], 4) == [
        [-1, -2, -3],
        [0, -1, -2],
        [1, 0, -1],
        [0, -1, -2],
        [3, 0, -1],
        [4, 3, 0],
    ]


@pytest.mark.parametrize("width", [2, 4])
def test_convolution_along_a_path(width: int) -> None:
    """A row's output is that of an ordinary causal convolution over its path."""
    torch.manual_seed(0)
    parents = tree(5, 30)
    inputs, history = torch.randn(30, 6).double(), torch.randn(width - 1, 6).double()
    weight, bias = torch.randn(6, width).double(), torch.randn(6).double()
    out = reference.short_conv(inputs, weight, bias, history, parents)
    for row in range(30):
        path = path_to(parents, row)
        sequence = torch.cat([history, inputs[path]]).T[None]
        causal = torch.nn.functional.conv1d(sequence, weight[:, None], bias, groups=6)[0, :, -1]
        torch.testing.assert_close(out[row], torch.nn.functional.silu(causal))
        committed = reference.commit_history(inputs, path, history)
        torch.testing.assert_close(committed, sequence[0].T[-(width - 1) :], rtol=0, atol=0)


def test_gates() -> None:
    a, A_log, dt_bias = torch.tensor([[0.5, 100.0]]), torch.tensor([0.0, -2.0]), torch.ones(2)
    g = reference.log_decays(a, A_log, dt_bias)
    torch.testing.assert_close(g[0, 0], -torch.tensor(1.5).exp().log1p())
    torch.testing.assert_close(g[0, 1], torch.tensor(-2.0).exp() * -101)


def test_value_heads_share_key_heads() -> None:
    rows = torch.randn(3, 2 * 2 * 8 + 4 * 5)
    q, k, v = reference.delta_inputs(rows, 2, 4, 8, 5)
    keys = rows[:, 16:32].unflatten(1, (2, 8))
    for head in range(4):
        expected = keys[:, head // 2] / keys[:, head // 2].norm(dim=-1, keepdim=True)
        torch.testing.assert_close(k[:, head], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q.norm(dim=-1), torch.full((3, 4), 8**-0.5), rtol=1e-4, atol=0)
    torch.testing.assert_close(v, rows[:, 32:].unflatten(1, (4, 5)), rtol=0, atol=0)
