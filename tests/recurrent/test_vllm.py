# SPDX-License-Identifier: Apache-2.0
"""Chains give what vLLM's own kernels give: delta rule and convolution."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating_delta_rule_update

from tests.recurrent.cases import Request, Sizes, Step, chain, make_layer

SIZES = Sizes(key_heads=2, heads=4, key_dim=32, value_dim=32)


@pytest.mark.parametrize("accepted", [1, 5, 8])
def test_delta_rule(accepted: int) -> None:
    """Outputs of all rows, and the state after the accepted ones: vLLM keeps one for each row."""
    step = Step(SIZES, [Request(chain(8)), Request(chain(5))])
    layer = make_layer(SIZES, 20, 0)
    paths = [list(range(min(accepted, 8))), list(range(min(accepted, 5)))]
    step.prepare()
    qkv = step.convolve(layer)

    rows = step.in_tree.nonzero().flatten()
    s, keys = SIZES, SIZES.key_heads * SIZES.key_dim
    q, k, v = qkv[rows][None].split([keys, keys, s.heads * s.value_dim], dim=-1)
    slots = torch.arange(1, 17, dtype=torch.int32).view(2, 8) + 2
    states = torch.zeros(20, s.heads, s.value_dim, s.key_dim)
    states[slots[:, 0].long()] = layer.states[step.blocks]
    wanted, _ = fused_sigmoid_gating_delta_rule_update(
        A_log=layer.A_log,
        a=step.a[0, rows],
        b=step.b[0, rows],
        dt_bias=layer.dt_bias,
        q=q.unflatten(-1, (s.key_heads, s.key_dim)).contiguous(),
        k=k.unflatten(-1, (s.key_heads, s.key_dim)).contiguous(),
        v=v.unflatten(-1, (s.heads, s.value_dim)).contiguous(),
        initial_state=states,
        inplace_final_state=True,
        cu_seqlens=step.query_start_loc,
        ssm_state_indices=slots,
        num_accepted_tokens=torch.ones(2, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    out = step.verify(layer, qkv)
    step.commit([layer], paths)
    torch.testing.assert_close(out[rows], wanted[0], rtol=1e-5, atol=1e-5)
    for req, path in enumerate(paths):
        kept = states[slots[req, len(path) - 1]]
        torch.testing.assert_close(layer.states[step.blocks[req]], kept, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_convolution(bias: bool) -> None:
    """A chain's outputs, and the inputs kept after the accepted rows, as token by token."""
    sizes = dataclasses.replace(SIZES, bias=bias)
    step = Step(sizes, [Request(chain(8))])
    layer = make_layer(sizes, 4, 0, spare=0)
    step.prepare()
    out = step.convolve(layer)[step.tree_rows(0)]
    states = layer.conv_states.clone(memory_format=torch.preserve_format)
    weight, wanted = layer.conv_weight, []
    for row in step.inputs[0, step.tree_rows(0)]:
        token = row.clone()[None]
        wanted.append(
            causal_conv1d_update(token, states, weight, layer.conv_bias, "silu", step.state_indices)
        )
    torch.testing.assert_close(out, torch.cat(wanted), rtol=1e-5, atol=1e-5)
    step.commit([layer], [list(range(8))])
    torch.testing.assert_close(layer.conv_states, states, rtol=0, atol=0)
