# SPDX-License-Identifier: Apache-2.0
"""Gated delta net on the CPU in float32: the core of a layer in plain PyTorch.

vLLM's own CPU core takes bfloat16 alone, and its CUDA core does not run in Triton's interpreter.
This one stands in the place of both, row by row: prefill and plain decoding, not vLLM's chains.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu, softplus
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name


def patch() -> None:
    """Puts the core in place. It must run before vLLM registers its CPU operators.

    - `layers/mamba/ops/cpu/gdn_attention.py` `cpu_gdn_attention_core`: goes to the layer's
      `_forward_core`, as vLLM's operator for CUDA does.
    - `QwenGatedDeltaNetAttention._forward_core`: the core below.
    """
    gdn_attention.cpu_gdn_attention_core = cpu_gdn_attention_core
    qwen_gdn_linear_attn.QwenGatedDeltaNetAttention._forward_core = forward_core


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
