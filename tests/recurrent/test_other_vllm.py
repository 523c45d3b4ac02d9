# SPDX-License-Identifier: Apache-2.0
"""Chains of Mamba2 and Kimi delta attention give what vLLM's own kernels give, row by row."""

from __future__ import annotations

import pytest
import torch

from tests.recurrent.cases import Request, Sizes, chain
from tests.recurrent.other_cases import BoundedKDAStep, KDAStep, Mamba2Step


def test_mamba2() -> None:
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

    s = Sizes(key_heads=2, heads=4, key_dim=32, value_dim=32)
    step = Mamba2Step(s, [Request(chain(8)), Request(chain(8))])
    layer = step.make_layer(s, step.num_blocks, 0)
    step.prepare()
    xbc = step.convolve(layer)
    out = step.verify(layer, xbc)
    states = layer.states.clone()
    rows = torch.stack([torch.arange(8) + step.root(req) for req in range(2)])
    for row in range(8):
        at = rows[:, row]
        x, b, c = xbc[at].split([s.heads * s.value_dim, 2 * s.key_dim, 2 * s.key_dim], dim=-1)
        wanted = torch.empty(2, s.heads, s.value_dim)
        selective_state_update(
            states,
            x.unflatten(-1, (s.heads, s.value_dim)).contiguous(),
            step.a[0, at][:, :, None].expand(-1, -1, s.value_dim),
            layer.A[:, None, None].expand(-1, s.value_dim, s.key_dim),
            b.unflatten(-1, (2, s.key_dim)).contiguous(),
            c.unflatten(-1, (2, s.key_dim)).contiguous(),
            layer.D[:, None].expand(-1, s.value_dim),
            dt_bias=layer.dt_bias[:, None].expand(-1, s.value_dim),
            dt_softplus=True,
            state_batch_indices=step.state_indices,
            out=wanted,
        )
        torch.testing.assert_close(out[at], wanted, rtol=1e-4, atol=1e-4)
        if row == 4:
            kept = states[step.blocks].clone()
    step.commit([layer], [list(range(5))] * 2)
    torch.testing.assert_close(layer.states[step.blocks], kept, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [KDAStep, BoundedKDAStep])
def test_kda(kind: type[KDAStep], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of all rows, and the state after the accepted ones: vLLM keeps one for each row."""
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent
    from vllm.triton_utils import tl

    if device == "cpu":
        # Triton's interpreter replaces the functions of `tl`, not other names of them.
        monkeypatch.setattr(fused_recurrent, "exp", lambda x: tl.exp(x))
        monkeypatch.setattr(fused_recurrent, "log", lambda x: tl.log(x))
    s = Sizes(key_heads=2, heads=2, key_dim=32, value_dim=32)
    step = kind(s, [Request(chain(8)), Request(chain(5))])
    layer = step.make_layer(s, step.num_blocks, 0)
    paths = [list(range(5)), [0]]
    step.prepare()
    qkv = step.convolve(layer)
    rows = step.in_tree.nonzero().flatten()
    q, k, v = (
        t.unflatten(-1, (s.heads, s.key_dim))[None].contiguous()
        for t in qkv[rows].split(s.heads * s.key_dim, dim=-1)
    )
    slots = torch.arange(1, 17, dtype=torch.int32).view(2, 8) + 2
    states = torch.zeros(20, s.heads, s.value_dim, s.key_dim)
    states[slots[:, 0].long()] = layer.states[step.blocks]
    wanted, _ = fused_recurrent.fused_recurrent_kda(
        q=q,
        k=k,
        v=v,
        raw_g=step.a[0, rows].unflatten(-1, (s.heads, s.key_dim))[None].contiguous(),
        raw_beta=step.b[0, rows][None].contiguous(),
        A_log=layer.A_log,
        dt_bias=layer.dt_bias.flatten(),
        lower_bound=layer.lower_bound,
        initial_state=states,
        cu_seqlens=step.query_start_loc,
        ssm_state_indices=slots,
        num_accepted_tokens=torch.ones(2, dtype=torch.int32),
    )
    out = step.verify(layer, qkv)
    step.commit([layer], paths)
    torch.testing.assert_close(out[rows], wanted[0], rtol=1e-5, atol=1e-5)
    for req, path in enumerate(paths):
        kept = states[slots[req, len(path) - 1]]
        torch.testing.assert_close(layer.states[step.blocks[req]], kept, rtol=1e-5, atol=1e-5)
