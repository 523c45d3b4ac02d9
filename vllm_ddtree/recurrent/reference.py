# SPDX-License-Identifier: Apache-2.0
"""Gated delta net over the rows of a tree, in plain PyTorch: what the kernels are tested against.

The recurrence (Gated DeltaNet, arXiv 2412.06464) of one value head, with the state S [V, K] as
vLLM's cache has it, p the parent of row i, and S_p the committed state for the root:

    S = exp(g_i) S_p     u_i = beta_i (v_i - S k_i)     S_i = S + u_i k_i^T     o_i = S_i q_i

A tree is one chunk of it. Let G_i be the sum of g over the path from the root to row i, and A_il
say that row l is a proper ancestor of row i:

    (I + M) U = diag(beta) (V - diag(exp G) K S_0^T)
    O = diag(exp G) Q S_0^T + P U
    M_il = A_il beta_i exp(G_i - G_l) (k_i . k_l)
    P_il = (A_il or i = l) exp(G_i - G_l) (q_i . k_l)

Exponents are differences along a path, so none is positive. A chain is a tree whose rows are all
ancestors of those after them. Functions take one request; heads are a dimension of the tensors.
All compute in float32, or in float64 for float64 input.
"""

from __future__ import annotations

import torch

NORM_EPSILON = 1e-6
"""Of the l2 norm of queries and keys, as in vLLM's kernels."""


def log_decays(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """The decay's logarithm g = -exp(A_log) softplus(a + dt_bias), never positive.

    Args:
        a: [n, Hv].
        A_log: [Hv].
        dt_bias: [Hv].

    Returns:
        [n, Hv].

    """
    return -A_log.exp() * torch.nn.functional.softplus(wide(a) + dt_bias)


def normalize(x: torch.Tensor) -> torch.Tensor:
    """Rows of length 1: x / sqrt(x . x + epsilon), over the last dimension."""
    x = wide(x)
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()


def delta_inputs(
    rows: torch.Tensor, num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of the recurrence, from the convolution's output.

    Queries and keys are normalised; queries are scaled by key_dim ** -0.5. Value head h reads key
    head h // (Hv / Hk).

    Args:
        rows: [n, 2 * Hk * K + Hv * V], queries, keys and values side by side.

    Returns:
        q, k: [n, Hv, K]. v: [n, Hv, V].

    """
    keys = num_key_heads * key_dim
    q, k, v = rows.split([keys, keys, num_value_heads * value_dim], dim=-1)
    group = num_value_heads // num_key_heads
    q, k = (
        normalize(x.unflatten(-1, (num_key_heads, key_dim))).repeat_interleave(group, dim=1)
        for x in (q, k)
    )
    return q * key_dim**-0.5, k, wide(v.unflatten(-1, (num_value_heads, value_dim)))


def conv_taps(parents: list[int], width: int) -> list[list[int]]:
    """What a causal convolution reads at each row besides the row itself, nearest first.

    Args:
        parents: parent of each row, -1 for the root.
        width: taps of the convolution, the row's own included.

    Returns:
        width - 1 numbers a row: the row of an ancestor, or -1 - j for the j-th newest committed
        input.

    """
    taps = []
    for row in range(len(parents)):
        line, at, committed = [], row, 0
        for _ in range(width - 1):
            at = parents[at] if at >= 0 else -1
            committed -= at < 0
            line.append(at if at >= 0 else committed)
        taps.append(line)
    return taps


def short_conv(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    history: torch.Tensor,
    parents: list[int],
) -> torch.Tensor:
    """Causal depthwise convolution along each row's path, and SiLU.

    Args:
        inputs: [n, C].
        weight: [C, W], oldest tap first.
        bias: [C] or None.
        history: [W - 1, C], the committed inputs, oldest first.
        parents: parent of each row, -1 for the root.

    Returns:
        [n, C] in the inputs' dtype.

    """
    width = weight.shape[1]
    # Row -1 - j of this is the j-th newest committed input: negative indices count from the end.
    both = wide(torch.cat([inputs, history]))
    taps = torch.tensor([[*reversed(t), row] for row, t in enumerate(conv_taps(parents, width))])
    out = torch.einsum("nwc,cw->nc", both[taps.to(inputs.device)], weight.to(both.dtype))
    if bias is not None:
        out = out + bias.to(out.dtype)
    return torch.nn.functional.silu(out).to(inputs.dtype)


def sequential(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    parents: list[int],
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence row by row, each from its parent's state.

    Args:
        q, k: [n, Hv, K].
        v: [n, Hv, V].
        g: [n, Hv], logarithms of the decays.
        beta: [n, Hv].
        parents: parent of each row, -1 for the root; parents come before their children.
        state: [Hv, V, K], the committed state.

    Returns:
        Outputs [n, Hv, V] and the state after each row [n, Hv, V, K].

    """
    states: list[torch.Tensor] = []
    for row, parent in enumerate(parents):
        before = (state if parent < 0 else states[parent]) * g[row].exp()[:, None, None]
        u = beta[row][:, None] * (v[row] - torch.einsum("hvk,hk->hv", before, k[row]))
        states.append(before + torch.einsum("hv,hk->hvk", u, k[row]))
    after = torch.stack(states)
    return torch.einsum("nhvk,nhk->nhv", after, q), after


def chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    ancestors: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same as `sequential`, all rows at once.

    Args:
        q, k, v, g, beta, state: as in `sequential`.
        ancestors: bool [n, n], True where row l is row i or an ancestor of it.

    Returns:
        Outputs [n, Hv, V], updates u [n, Hv, V] and cumulative decays G [n, Hv].

    """
    total = ancestors.to(g.dtype) @ g
    # The mask comes first: between rows that are not related the difference may be positive.
    difference = (total[:, None] - total[None]).permute(2, 0, 1)
    decay = difference.masked_fill(~ancestors, float("-inf")).exp()
    kept = total.exp().T[:, :, None]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # heads first
    b = beta.T[:, :, None]
    proper = ancestors & ~torch.eye(len(g), dtype=torch.bool, device=g.device)
    m = torch.where(proper, b * decay * (k @ k.mT), 0.0)
    identity = torch.eye(len(g), dtype=g.dtype, device=g.device)
    u = torch.linalg.solve_triangular(identity + m, b * (v - kept * (k @ state.mT)), upper=False)
    out = kept * (q @ state.mT) + (decay * (q @ k.mT)) @ u
    return out.transpose(0, 1), u.transpose(0, 1), total


def commit_state(
    k: torch.Tensor,
    u: torch.Tensor,
    total: torch.Tensor,
    path: list[int],
    state: torch.Tensor,
) -> torch.Tensor:
    """The state after the rows of a path, from what `chunk` returns.

    S_new = exp(G_m) S_0 + sum over the path of exp(G_m - G_j) u_j k_j^T.

    Args:
        k, u, total: as in `chunk`.
        path: rows of the path, root first.
        state: [Hv, V, K], the committed state.

    """
    last = total[path[-1]]
    weights = (last - total[path]).exp()
    update = torch.einsum("jhv,jhk,jh->hvk", u[path], k[path], weights)
    return last.exp()[:, None, None] * state + update


def commit_history(inputs: torch.Tensor, path: list[int], history: torch.Tensor) -> torch.Tensor:
    """The convolution's committed inputs after a path: the last W - 1, oldest first.

    Args:
        inputs: [n, C].
        path: rows of the path, root first.
        history: [W - 1, C], the committed inputs before it.

    """
    return torch.cat([history, inputs[path]])[-history.shape[0] :]


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
