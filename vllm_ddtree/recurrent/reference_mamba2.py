# SPDX-License-Identifier: Apache-2.0
"""Mamba2 over the rows of a tree, in plain PyTorch: the reference for its kernels.

The recurrence (Mamba2, arXiv 2405.21060) of one head, with the state S [V, K] as vLLM's cache has
it (V: the head's size, K: the state's), and p the parent of row i:

    S_i = exp(g_i) S_p + dt_i x_i B_i^T     y_i = S_i C_i + D x_i     g_i = dt_i A

In the words of gated delta net (`reference.py`): C is the query, B the key, dt x the update. No
update depends on another, so nothing is solved. With G_i the sum of g over the path to row i:

    Y = diag(exp G) C S_0^T + P diag(dt) X + D X
    P_il = (row l is row i or an ancestor of it) exp(G_i - G_l) (C_i . B_l)

Convolution and conventions are those of `reference.py`.
"""

from __future__ import annotations

import torch

from vllm_ddtree.recurrent.reference import wide


def time_steps(raw: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """dt = softplus(raw + dt_bias): both [n, H] and [H], as vLLM's `selective_state_update`."""
    return torch.nn.functional.softplus(wide(raw) + dt_bias)


def mamba_inputs(
    rows: torch.Tensor, num_groups: int, num_heads: int, state_dim: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, B and C from the convolution's output. Head h reads group h // (H / num_groups).

    Args:
        rows: [n, H * V + 2 * num_groups * K], x, B and C side by side.

    Returns:
        x: [n, H, V]. B, C: [n, H, K].

    """
    keys = num_groups * state_dim
    x, b, c = wide(rows).split([num_heads * head_dim, keys, keys], dim=-1)
    share = num_heads // num_groups
    b, c = (
        t.unflatten(-1, (num_groups, state_dim)).repeat_interleave(share, dim=1) for t in (b, c)
    )
    return x.unflatten(-1, (num_heads, head_dim)), b, c


def sequential(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    parents: list[int],
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence row by row, each from its parent's state.

    Args:
        x: [n, H, V].
        b, c: [n, H, K].
        dt: [n, H], positive.
        A, D: [H]; A is negative.
        parents: parent of each row, -1 for the root; parents come before their children.
        state: [H, V, K], the committed state.

    Returns:
        Outputs [n, H, V] and the state after each row [n, H, V, K].

    """
    states: list[torch.Tensor] = []
    for row, parent in enumerate(parents):
        before = (state if parent < 0 else states[parent]) * (dt[row] * A).exp()[:, None, None]
        states.append(before + torch.einsum("h,hv,hk->hvk", dt[row], x[row], b[row]))
    after = torch.stack(states)
    return torch.einsum("nhvk,nhk->nhv", after, c) + D[:, None] * x, after


def chunk(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    ancestors: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `sequential`, all rows at once.

    Args:
        x, b, c, dt, A, D, state: as in `sequential`.
        ancestors: bool [n, n], True where row l is row i or an ancestor of it.

    Returns:
        Outputs [n, H, V] and cumulative decays G [n, H].

    """
    total = ancestors.to(dt.dtype) @ (dt * A)
    # The mask comes first: between rows that are not related the difference may be positive.
    difference = (total[:, None] - total[None]).permute(2, 0, 1)
    decay = difference.masked_fill(~ancestors, float("-inf")).exp()
    x, b, c = (t.transpose(0, 1) for t in (x, b, c))  # heads first
    kept = total.exp().T[:, :, None]
    out = kept * (c @ state.mT) + (decay * (c @ b.mT)) @ (dt.T[:, :, None] * x)
    return (out + D[:, None, None] * x).transpose(0, 1), total


def commit_state(
    x: torch.Tensor,
    b: torch.Tensor,
    dt: torch.Tensor,
    total: torch.Tensor,
    path: list[int],
    state: torch.Tensor,
) -> torch.Tensor:
    """The state after the rows of a path.

    S_new = exp(G_m) S_0 + sum over the path of exp(G_m - G_j) dt_j x_j B_j^T.

    Args:
        x, b, dt: as in `sequential`.
        total: as from `chunk`.
        path: rows of the path, root first.
        state: [H, V, K], the committed state.

    """
    last = total[path[-1]]
    weights = (last - total[path]).exp() * dt[path]
    update = torch.einsum("jhv,jhk,jh->hvk", x[path], b[path], weights)
    return last.exp()[:, None, None] * state + update
