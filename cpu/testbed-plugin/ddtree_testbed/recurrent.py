# SPDX-License-Identifier: Apache-2.0
"""Gated delta net and Mamba2 on the CPU in float32: the core of a layer in plain PyTorch.

vLLM's own CPU cores take bfloat16 alone, and its CUDA cores do not run in Triton's interpreter.
These stand in their place, row by row: prefill and plain decoding, not vLLM's chains.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu, softplus
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name


def patch() -> None:
    """Puts the core in place. It must run before vLLM registers its CPU operators.

    - `layers/mamba/ops/cpu/gdn_attention.py` `cpu_gdn_attention_core`: goes to the layer's
      `_forward_core`, as vLLM's operator for CUDA does.
    - `QwenGatedDeltaNetAttention._forward_core`, `MambaMixer2.conv_ssm_forward`: the cores below.
    """
    gdn_attention.cpu_gdn_attention_core = cpu_gdn_attention_core
    qwen_gdn_linear_attn.QwenGatedDeltaNetAttention._forward_core = forward_core
    mamba_mixer2.MambaMixer2.conv_ssm_forward = conv_ssm_forward


def cpu_gdn_attention_core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,  # vLLM reads the annotations
) -> None:
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    layer._forward_core(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)


def forward_core(
    self: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: Any
) -> None:
    all_metadata = get_forward_context().attn_metadata
    if all_metadata is None:
        return
    metadata = all_metadata[self.prefix]
    if metadata.spec_sequence_masks is not None:
        raise NotImplementedError("the test bed has no chains of vLLM's on recurrent layers")
    starts = metadata.non_spec_query_start_loc.tolist()
    blocks = metadata.non_spec_state_indices_tensor.tolist()
    num_reqs = metadata.num_decodes + metadata.num_prefills
    known = [True] * num_reqs
    if metadata.has_initial_state is not None:
        known = metadata.has_initial_state[:num_reqs].tolist()
    conv_states, states = self.kv_cache
    if not is_conv_state_dim_first():
        conv_states = conv_states.transpose(-1, -2)
    for req in range(num_reqs):
        rows = slice(starts[req], starts[req + 1])
        if not known[req]:
            conv_states[blocks[req]] = 0
            states[blocks[req]] = 0
        core_attn_out[rows] = _advance(
            self, mixed_qkv[rows], a[rows], b[rows], conv_states[blocks[req]], states[blocks[req]]
        )


def _advance(
    layer: Any,
    inputs: torch.Tensor,  # [n, C]
    a: torch.Tensor,  # [n, Hv]
    b: torch.Tensor,  # [n, Hv]
    conv_state: torch.Tensor,  # [C, at least W - 1], in/out
    state: torch.Tensor,  # [Hv, V, K], in/out
) -> torch.Tensor:  # [n, Hv, V]
    """One request's rows, after those that made its state."""
    weight = layer.conv1d.weight.flatten(1)
    width = weight.shape[1]
    past = torch.cat([conv_state[:, : width - 1].T, inputs]).float()
    conv_state[:, : width - 1] = past[-(width - 1) :].T.to(conv_state.dtype)
    mixed = silu((past.unfold(0, width, 1) * weight).sum(-1))

    num_heads, value_dim, key_dim = state.shape
    num_key_heads = layer.num_k_heads // layer.tp_size
    keys = num_key_heads * key_dim
    q, k, v = mixed.split([keys, keys, num_heads * value_dim], dim=-1)
    q, k = (
        _unit(x.unflatten(-1, (num_key_heads, key_dim))).repeat_interleave(
            num_heads // num_key_heads, dim=1
        )
        for x in (q, k)
    )
    v = v.unflatten(-1, (num_heads, value_dim))
    decay = (-layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias)).exp()
    beta = b.float().sigmoid()
    now = state.float()
    out = torch.empty_like(v)
    for i in range(len(inputs)):
        now = now * decay[i, :, None, None]
        update = beta[i, :, None] * (v[i] - (now * k[i, :, None]).sum(-1))
        now = now + update[:, :, None] * k[i, :, None]
        out[i] = (now * q[i, :, None]).sum(-1) * key_dim**-0.5
    state.copy_(now)
    return out.to(inputs.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def conv_ssm_forward(self: Any, projected_states: torch.Tensor, output: torch.Tensor) -> None:
    all_metadata = get_forward_context().attn_metadata
    if all_metadata is None or self.prefix not in all_metadata:
        return
    metadata = all_metadata[self.prefix]
    decodes = metadata.num_decodes
    if metadata.num_decode_tokens != decodes:
        raise NotImplementedError("the test bed has no chains of vLLM's on recurrent layers")
    starts, blocks, known = [*range(decodes)], [], [True] * decodes
    # States inside a prefill that vLLM wants to cache, and their blocks.
    cuts = [(0, 0)] * (decodes + metadata.num_prefills)
    if metadata.checkpoint_meta is not None:
        cached = metadata.checkpoint_meta
        places = zip(cached.checkpoint_offsets.tolist(), cached.state_indices.tolist(), strict=True)
        cuts[decodes:] = places
    if decodes:
        blocks += metadata.state_indices_tensor_d[:, 0].tolist()
    if metadata.num_prefills:
        starts += (metadata.query_start_loc_p + decodes).tolist()
        blocks += metadata.state_indices_tensor_p.tolist()
        known += metadata.has_initial_states_p.tolist()
    else:
        starts.append(decodes)
    conv_states, states = self.kv_cache
    if not is_conv_state_dim_first():
        conv_states = conv_states.transpose(-1, -2)
    widths = [self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size]
    _, inputs, raw = projected_states.split(widths, dim=-1)
    for req in range(decodes + metadata.num_prefills):
        rows, block = slice(starts[req], starts[req + 1]), blocks[req]
        if not known[req]:
            conv_states[block] = 0
            states[block] = 0
        cut, cut_block = cuts[req]
        if cut:
            part = slice(rows.start, rows.start + cut)
            output[part] = _advance_mamba2(
                self, inputs[part], raw[part], conv_states[block], states[block]
            )
            conv_states[cut_block] = conv_states[block]
            states[cut_block] = states[block]
            rows = slice(part.stop, rows.stop)
        output[rows] = _advance_mamba2(
            self, inputs[rows], raw[rows], conv_states[block], states[block]
        )


def _advance_mamba2(
    layer: Any,
    inputs: torch.Tensor,  # [n, C]
    raw: torch.Tensor,  # [n, H]
    conv_state: torch.Tensor,  # [C, at least W - 1], in/out
    state: torch.Tensor,  # [H, V, K], in/out
) -> torch.Tensor:  # [n, H * V]
    """One request's rows, after those that made its state."""
    weight = layer.conv_weights
    width = weight.shape[1]
    past = torch.cat([conv_state[:, : width - 1].T, inputs]).float()
    conv_state[:, : width - 1] = past[-(width - 1) :].T.to(conv_state.dtype)
    mixed = (past.unfold(0, width, 1) * weight).sum(-1)
    if layer.conv1d.bias is not None:
        mixed = mixed + layer.conv1d.bias
    num_heads, head_dim, state_dim = state.shape
    groups = layer.n_groups // layer.tp_size
    x, b, c = silu(mixed).split([num_heads * head_dim, groups * state_dim, groups * state_dim], -1)
    x = x.unflatten(-1, (num_heads, head_dim))
    b, c = (
        t.unflatten(-1, (groups, state_dim)).repeat_interleave(num_heads // groups, dim=1)
        for t in (b, c)
    )
    dt = softplus(raw.float() + layer.dt_bias)
    decay = (dt * layer.A.float()).exp()
    now = state.float()
    out = torch.empty_like(x)
    for i in range(len(inputs)):
        update = (dt[i, :, None] * x[i])[:, :, None] * b[i, :, None]
        now = now * decay[i, :, None, None] + update
        out[i] = (now * c[i, :, None]).sum(-1) + layer.D[:, None] * x[i]
    state.copy_(now)
    return out.flatten(1).to(inputs.dtype)
