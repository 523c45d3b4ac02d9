# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention over the rows of a tree, in plain PyTorch: the reference for its kernels.

The recurrence (Kimi Linear, arXiv 2510.26692) is gated delta net's (`reference.py`) with a decay
for each key channel. For one head, with the state S [V, K] and p the parent of row i:

    S = S_p diag(exp g_i)     u_i = beta_i (v_i - S k_i)     S_i = S + u_i k_i^T     o_i = S_i q_i

A tree is one chunk of it. G_i, a vector now, is the sum of g over the path from the root to row i,
and A_il says that row l is a proper ancestor of row i. The decay no longer leaves the products:

    (I + M) U = diag(beta) (V - (K * exp G) S_0^T)
    O = (Q * exp G) S_0^T + P U
    M_il = A_il beta_i sum over c of k_ic k_lc exp(G_ic - G_lc)
    P_il = (A_il or i = l) sum over c of q_ic k_lc exp(G_ic - G_lc)

Convolution, normalisation and conventions are those of `reference.py`.
"""

from __future__ import annotations

import torch

from vllm_ddtree.recurrent.reference import wide


def log_decays(
    raw: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """The decays' logarithms, never positive (vLLM: models/kimi_k3/nvidia/ops/third_party/kda).

    g = -exp(A_log) softplus(raw + dt_bias), or, where the model bounds them,
    g = lower_bound sigmoid(exp(A_log) (raw + dt_bias)).

    Args:
        raw: [n, H, K].
        A_log: [H].
        dt_bias: [H, K].
        lower_bound: negative, or None.

    Returns:
        [n, H, K].

    """
    x, rate = wide(raw) + dt_bias, A_log.exp()[:, None]
    if lower_bound is not None:
        return lower_bound * (rate * x).sigmoid()
    return -rate * torch.nn.functional.softplus(x)


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
        q, k: [n, H, K].
        v: [n, H, V].
        g: [n, H, K], logarithms of the decays.
        beta: [n, H].
        parents: parent of each row, -1 for the root; parents come before their children.
        state: [H, V, K], the committed state.

    Returns:
        Outputs [n, H, V] and the state after each row [n, H, V, K].

    """
    states: list[torch.Tensor] = []
    for row, parent in enumerate(parents):
        before = (state if parent < 0 else states[parent]) * g[row].exp()[:, None]
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
        Outputs [n, H, V], updates u [n, H, V] and cumulative decays G [n, H, K].

    """
    total = torch.einsum("il,lhc->ihc", ancestors.to(g.dtype), g)
    # The mask comes first: between rows that are not related the difference may be positive.
    difference = (total[:, None] - total[None]).permute(2, 0, 1, 3)  # [H, n, n, K]
    decay = difference.masked_fill(~ancestors[:, :, None], float("-inf")).exp()
    kept = total.exp().transpose(0, 1)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # heads first
    b = beta.T[:, :, None]
    proper = ancestors & ~torch.eye(len(g), dtype=torch.bool, device=g.device)
    by_key = torch.einsum("hic,hlc,hilc->hil", k, k, decay)
    by_query = torch.einsum("hic,hlc,hilc->hil", q, k, decay)
    identity = torch.eye(len(g), dtype=g.dtype, device=g.device)
    m = torch.where(proper, b * by_key, 0.0)
    right = b * (v - (k * kept) @ state.mT)
    u = torch.linalg.solve_triangular(identity + m, right, upper=False)
    out = (q * kept) @ state.mT + by_query @ u
    return out.transpose(0, 1), u.transpose(0, 1), total


def commit_state(
    k: torch.Tensor,
    u: torch.Tensor,
    total: torch.Tensor,
    path: list[int],
    state: torch.Tensor,
) -> torch.Tensor:
    """The state after the rows of a path, from what `chunk` returns.

    S_new = S_0 diag(exp G_m) + sum over the path of u_j (k_j * exp(G_m - G_j))^T.

    Args:
        k, u, total: as in `chunk`.
        path: rows of the path, root first.
        state: [H, V, K], the committed state.

    """
    last = total[path[-1]]
    keys = k[path] * (last - total[path]).exp()
    return last.exp()[:, None] * state + torch.einsum("jhv,jhk->hvk", u[path], keys)
