# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention and Mamba2: the forms of each reference agree, in float64 to rounding."""

import pytest
import torch

from tests.recurrent.cases import path_to, tree
from tests.recurrent.test_reference import ancestors_of
from vllm_ddtree.recurrent import reference, reference_kda, reference_mamba2

DECAYS = [0.0, 0.1, 3.0, 200.0]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def random_parents(seed: int) -> list[int]:
    torch.manual_seed(seed)
    return tree(seed, int(torch.randint(1, 257, ())), max_depth=31)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("seed", range(5))
def test_a_chunk_of_kda_is_the_recurrence(seed: int, decay: float) -> None:
    parents = random_parents(seed)
    n, heads, key_dim, value_dim = len(parents), 2, 12, 20
    q, k = normal(n, heads, key_dim), reference.normalize(normal(n, heads, key_dim))
    v, beta = normal(n, heads, value_dim), uniform(n, heads)
    # Channels that never forget beside channels that forget all.
    g = -decay * uniform(n, heads, key_dim) * (uniform(heads, key_dim) > 0.3)
    state = normal(heads, value_dim, key_dim)
    out, states = reference_kda.sequential(q, k, v, g, beta, parents, state)
    got, u, total = reference_kda.chunk(q, k, v, g, beta, ancestors_of(parents), state)
    torch.testing.assert_close(got, out, rtol=0, atol=1e-12)
    for row in {0, n // 2, n - 1}:
        committed = reference_kda.commit_state(k, u, total, path_to(parents, row), state)
        torch.testing.assert_close(committed, states[row], rtol=0, atol=1e-12)


def test_kda_with_equal_channels_is_gated_delta_net() -> None:
    torch.manual_seed(0)
    parents, heads, dim = tree(3, 40), 2, 8
    q, k, v = (normal(40, heads, dim) for _ in "qkv")
    k, g, beta = reference.normalize(k), -uniform(40, heads), uniform(40, heads)
    state = normal(heads, dim, dim)
    wide = g[:, :, None].expand(-1, -1, dim)
    got = reference_kda.sequential(q, k, v, wide, beta, parents, state)
    wanted = reference.sequential(q, k, v, g, beta, parents, state)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_decays_of_kda() -> None:
    raw = torch.tensor([[[0.5, 100.0]]])
    A_log, dt_bias = torch.tensor([0.0]), torch.tensor([[1.0, -1.0]])
    free = reference_kda.log_decays(raw, A_log, dt_bias, None)
    torch.testing.assert_close(free[0, 0, 0], -torch.tensor(1.5).exp().log1p())
    torch.testing.assert_close(free[0, 0, 1], torch.tensor(-99.0))
    bounded = reference_kda.log_decays(raw, A_log, dt_bias, -5.0)
    torch.testing.assert_close(bounded[0, 0, 0], -5 * torch.tensor(1.5).sigmoid())
    torch.testing.assert_close(bounded[0, 0, 1], torch.tensor(-5.0))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("seed", range(5))
def test_a_chunk_of_mamba2_is_the_recurrence(seed: int, decay: float) -> None:
    parents = random_parents(seed)
    n, heads, state_dim, head_dim = len(parents), 2, 12, 20
    x, b, c = normal(n, heads, head_dim), normal(n, heads, state_dim), normal(n, heads, state_dim)
    dt, A, D = uniform(n, heads), -decay * uniform(heads), normal(heads)
    state = normal(heads, head_dim, state_dim)
    out, states = reference_mamba2.sequential(x, b, c, dt, A, D, parents, state)
    got, total = reference_mamba2.chunk(x, b, c, dt, A, D, ancestors_of(parents), state)
    torch.testing.assert_close(got, out, rtol=0, atol=1e-11)
    for row in {0, n // 2, n - 1}:
        path = path_to(parents, row)
        committed = reference_mamba2.commit_state(x, b, dt, total, path, state)
        torch.testing.assert_close(committed, states[row], rtol=0, atol=1e-12)


def test_groups_and_order_of_mamba2() -> None:
    rows = torch.randn(3, 4 * 5 + 2 * 2 * 8)
    x, b, c = reference_mamba2.mamba_inputs(rows, 2, 4, 8, 5)
    torch.testing.assert_close(x, rows[:, :20].unflatten(1, (4, 5)), rtol=0, atol=0)
    for head in range(4):
        start = 20 + head // 2 * 8
        torch.testing.assert_close(b[:, head], rows[:, start : start + 8], rtol=0, atol=0)
        torch.testing.assert_close(c[:, head], rows[:, start + 16 : start + 24], rtol=0, atol=0)
