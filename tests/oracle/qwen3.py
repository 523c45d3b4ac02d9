# SPDX-License-Identifier: Apache-2.0
"""A dense Qwen3 decoder in plain PyTorch: float32, CPU, one sequence (vLLM: `models/qwen3.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

# Keys (normed, rotated) and values of a layer, each float32 [num_tokens, num_kv_heads, head_dim].
KeyValue = tuple[Tensor, Tensor]


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder's safetensors files, cast to float32."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    return {name: t.float() for file in files for name, t in load_file(file).items()}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis; x float32 [..., n], weight float32 [n]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@dataclass(frozen=True)
class LayerShape:
    """The sizes that a Qwen3 layer needs, read from a checkpoint's `config.json`."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LayerShape:
        """Raises NotImplementedError for a feature that this oracle does not compute."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise NotImplementedError(f"RoPE type {rope['rope_type']!r}")
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise NotImplementedError("sliding-window layers")
        if config.get("attention_bias"):
            raise NotImplementedError("attention biases")
        return cls(
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 1_000_000.0)),
        )


class Rope:
    """Rotary embedding of Qwen3: the two halves of a head are the pairs (NeoX style)."""

    def __init__(self, head_dim: int, theta: float) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.inv_freq = 1.0 / theta**exponents

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x float32 [n, num_heads, head_dim], positions int64 [n]; returns x's shape."""
        angles = positions.float()[:, None] * self.inv_freq
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Layer:
    """One Qwen3 decoder layer; targets and DFlash drafters share it."""

    def __init__(self, weights: dict[str, Tensor], prefix: str, shape: LayerShape) -> None:
        """Takes (removes) the layer's tensors out of `weights`."""

        def take(name: str) -> Tensor:
            return weights.pop(f"{prefix}{name}.weight")

        self.shape = shape
        self.rope = Rope(shape.head_dim, shape.rope_theta)
        self.q_proj, self.k_proj = take("self_attn.q_proj"), take("self_attn.k_proj")
        self.v_proj, self.o_proj = take("self_attn.v_proj"), take("self_attn.o_proj")
        self.q_norm, self.k_norm = take("self_attn.q_norm"), take("self_attn.k_norm")
        self.gate_proj, self.up_proj = take("mlp.gate_proj"), take("mlp.up_proj")
        self.down_proj = take("mlp.down_proj")
        self.input_norm = take("input_layernorm")
        self.post_attention_norm = take("post_attention_layernorm")

    def key_value(self, x: Tensor, positions: Tensor) -> KeyValue:
        """Keys and values of normed inputs x [n, hidden] at positions [n]."""
        s = self.shape
        k = (x @ self.k_proj.T).view(-1, s.num_kv_heads, s.head_dim)
        v = (x @ self.v_proj.T).view(-1, s.num_kv_heads, s.head_dim)
        return self.rope(rms_norm(k, self.k_norm, s.rms_norm_eps), positions), v

    def forward(
        self, x: Tensor, positions: Tensor, past: KeyValue | None, mask: Tensor | None
    ) -> tuple[Tensor, KeyValue]:
        """One layer over x.

        Args:
            x: float32 [n, hidden], the residual stream that enters the layer.
            positions: int64 [n], RoPE positions.
            past: keys and values [m, ...] that stand before x's own, or None.
            mask: bool [n, m + n], True where a row may look; None: everywhere.

        Returns:
            The residual stream that leaves the layer, and keys and values [m + n, ...].
        """
        eps = self.shape.rms_norm_eps
        out, kv = self.attention(rms_norm(x, self.input_norm, eps), positions, past, mask)
        x = x + out
        return x + self.mlp(rms_norm(x, self.post_attention_norm, eps)), kv

    def attention(
        self, h: Tensor, positions: Tensor, past: KeyValue | None, mask: Tensor | None
    ) -> tuple[Tensor, KeyValue]:
        """What attention adds to the residual stream, of normed inputs h; otherwise `forward`."""
        s = self.shape
        q = (h @ self.q_proj.T).view(-1, s.num_heads, s.head_dim)
        q = self.rope(rms_norm(q, self.q_norm, s.rms_norm_eps), positions)
        k, v = self.key_value(h, positions)
        if past is not None:
            k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
        group = s.num_heads // s.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * s.head_dim**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))
        return out.flatten(1) @ self.o_proj.T, (k, v)

    def mlp(self, h: Tensor) -> Tensor:
        """What the MLP adds, of normed inputs h."""
        return (F.silu(h @ self.gate_proj.T) * (h @ self.up_proj.T)) @ self.down_proj.T


class Target:
    """A Qwen3ForCausalLM checkpoint in float32 on the CPU."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Raises ValueError when tensors are left over, KeyError when one is missing."""
        weights = dict(weights)
        self.shape = LayerShape.from_config(config)
        self.embed_tokens = weights.pop("model.embed_tokens.weight")
        tied = config.get("tie_word_embeddings", False)
        self.lm_head = self.embed_tokens if tied else weights.pop("lm_head.weight")
        self.norm = weights.pop("model.norm.weight")
        self.layers = [
            Layer(weights, f"model.layers.{i}.", self.shape) for i in range(self.shape.num_layers)
        ]
        if weights:
            raise ValueError(f"tensors without a place: {sorted(weights)}")

    @classmethod
    def load(cls, folder: str | Path) -> Target:
        """Reads `config.json` and the safetensors files of `folder`."""
        return cls(json.loads((Path(folder) / "config.json").read_text()), read_weights(folder))

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int], past: list[KeyValue] | None = None
    ) -> tuple[Tensor, list[Tensor], list[KeyValue]]:
        """One causal pass.

        Args:
            token_ids: n tokens, at the positions after those of `past`.
            past: keys and values of each layer, as an earlier call returned them.

        Returns:
            hidden: float32 [n, hidden], after the final norm.
            states: num_layers + 1 tensors float32 [n, hidden]; states[i] enters layer i (residual
                added), the last one leaves the last layer. vLLM's auxiliary state i is states[i].
            past: keys and values of each layer, the new rows included.
        """
        n, m = len(token_ids), past[0][0].shape[0] if past else 0
        positions = torch.arange(m, m + n)
        mask = torch.arange(m + n)[None] <= positions[:, None]
        x = self.embed_tokens[torch.tensor(token_ids)]
        states, new = [x], []
        for i, layer in enumerate(self.layers):
            x, kv = layer.forward(x, positions, past[i] if past else None, mask)
            states.append(x)
            new.append(kv)
        return rms_norm(x, self.norm, self.shape.rms_norm_eps), states, new

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., vocab] of final hidden states float32 [..., hidden]."""
        return hidden @ self.lm_head.T


@torch.inference_mode()
def greedy(target: Target, prompt_ids: Sequence[int], n: int) -> list[int]:
    """The `n` tokens of plain greedy decoding after `prompt_ids`; end-of-text does not stop it."""
    hidden, _, past = target.forward(prompt_ids)
    output: list[int] = []
    while len(output) < n:
        output.append(int(target.logits(hidden[-1]).argmax()))
        if len(output) < n:
            hidden, _, past = target.forward(output[-1:], past)
    return output
