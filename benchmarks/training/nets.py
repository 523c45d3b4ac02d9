# SPDX-License-Identifier: Apache-2.0
"""The small networks in plain PyTorch: Qwen3 and Qwen3.5 targets, DFlash drafters.

Parameter names are those of the checkpoints that vLLM loads. Everything runs on any device.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

CHUNK = 64  # rows that the delta rule handles at once


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a target or of a drafter.

    The default of `rotary_dim` is the whole head. `linear_*` are those of a gated delta net; 0 key
    heads: every layer is attention.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rotary_dim: int = 0
    theta: float = 10000.0
    eps: float = 1e-6
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    taps: int = 4
    interval: int = 4  # every fourth layer is attention

    @property
    def hybrid(self) -> bool:
        return self.linear_key_heads > 0

    def is_linear(self, layer: int) -> bool:
        return self.hybrid and (layer + 1) % self.interval != 0


class RMSNorm(nn.Module):
    """RMSNorm; `offset` 1 where the checkpoint holds the weight less one."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (self.weight.float() + self.offset)).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float, dim: int) -> Tensor:
    """RoPE (neox) over the first `dim` of each head. x [B, H, L, D], positions [B, L]."""
    steps = torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim
    angles = positions[:, None, :, None].float() / theta**steps
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
    head, rest = x[..., :dim], x[..., dim:]
    half = dim // 2
    turned = head * cos + torch.cat([-head[..., half:], head[..., :half]], -1) * sin
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


class Attention(nn.Module):
    """Qwen3's attention; in a hybrid target Qwen3.5's, with a gate beside each query."""

    def __init__(self, sizes: Sizes, gated: bool = False) -> None:
        super().__init__()
        s = self.sizes = sizes
        self.gated = gated
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim * (2 if gated else 1), bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = RMSNorm(s.head_dim, s.eps, float(gated))
        self.k_norm = RMSNorm(s.head_dim, s.eps, float(gated))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions, self.sizes.theta, self.sizes.rotary_dim or x.shape[-1])

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*x.shape[:2], self.sizes.kv_heads, self.sizes.head_dim)
        keys = self._rotate(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), positions)
        return keys, self.v_proj(x).view(shape).transpose(1, 2)

    def queries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        s = self.sizes
        q, gate = self.q_proj(x), None
        if self.gated:
            q, gate = q.view(*x.shape[:2], s.heads, 2 * s.head_dim).chunk(2, -1)
            gate = gate.reshape(*x.shape[:2], -1)
        q = self.q_norm(q.view(*x.shape[:2], s.heads, s.head_dim)).transpose(1, 2)
        return self._rotate(q, positions), gate

    def mix(
        self,
        q: Tensor,
        gate: Tensor | None,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        batch, heads, length, dim = q.shape
        group = heads // k.shape[1]
        if length == 1 and mask is None:  # the queries of a KV head are so many queries on it
            q = q.view(batch, heads // group, group, dim)
            out = F.scaled_dot_product_attention(q, k, v).reshape(batch, 1, heads * dim)
        else:
            if group > 1:
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
            out = out.transpose(1, 2).reshape(batch, length, heads * dim)
        return self.o_proj(out if gate is None else out * gate.sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention of whole texts [B, L, H]."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        k, v = self.keys(x, positions)
        return self.mix(*self.queries(x, positions), k, v, causal=True)

    def step(self, x: Tensor, cache: tuple[Tensor, Tensor], start: int) -> Tensor:
        """Rows `start` on, with a cache of [B, KV heads, length, D] that they are written to."""
        length = x.shape[1]
        positions = torch.arange(start, start + length, device=x.device)[None]
        k, v = self.keys(x, positions)
        end = start + length
        cache[0][:, :, start:end], cache[1][:, :, start:end] = k, v
        return self.mix(
            *self.queries(x, positions),
            cache[0][:, :, :end].to(k.dtype),
            cache[1][:, :, :end].to(k.dtype),
            causal=length > 1,
        )


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 of strictly lower triangular [..., C, C]; C is a multiple of 16.

    Blocks of 16 by powers (lower^16 is 0), larger ones from their halves.
    """
    size, batch = lower.shape[-1], lower.shape[:-2]

    def diagonal(width: int) -> Tensor:
        blocks = lower.reshape(*batch, size // width, width, size // width, width)
        return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    width = 16
    power = -diagonal(width)
    eye = torch.eye(width, device=lower.device, dtype=lower.dtype)
    out = eye + power
    for _ in range(3):
        power = power @ power
        out = out + out @ power
    while width < size:
        corner = diagonal(2 * width)[..., width:, :width]
        first, second = out[..., 0::2, :, :], out[..., 1::2, :, :]
        corner = -(second @ corner @ first)
        top = torch.cat([first, torch.zeros_like(first)], -1)
        out = torch.cat([top, torch.cat([corner, second], -1)], -2)
        width *= 2
    return out[..., 0, :, :]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (arXiv 2412.06464) in chunks.

    Args:
        q: float32 [B, L, H, Dk], normalised and scaled; `k` likewise, not scaled.
        k: float32 [B, L, H, Dk].
        v: float32 [B, L, H, Dv].
        decay: float32 [B, L, H], log of the decay.
        beta: float32 [B, L, H].
        state: float32 [B, H, Dk, Dv], None: zero.

    Returns:
        outputs [B, L, H, Dv] and the last state.

    """
    length = q.shape[1]
    pad = -length % CHUNK

    def chunks(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad)) if pad else x
        return x.transpose(1, 2).unflatten(2, (-1, CHUNK))

    q, k, v, decay, beta = (chunks(x) for x in (q, k, v, decay, beta))
    total = decay.cumsum(-1)
    gaps = total[..., :, None] - total[..., None, :]
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = gaps.masked_fill(above, float("-inf")).exp()
    keys = k.transpose(-1, -2)
    system = (beta[..., None] * (k @ keys) * between).tril(-1)
    # The gradient of an inverse needs the inverse alone.
    with torch.no_grad():
        inverse = unit_lower_inverse(system)
    if system.requires_grad:
        inverse = inverse - inverse @ (system - system.detach()) @ inverse
    grown = total.exp()[..., None]
    u = inverse @ (beta[..., None] * v)
    w = inverse @ (beta[..., None] * grown * k)
    own = (q @ keys) * between
    q = q * grown
    last = total[..., -1:]
    k = (k * (last - total).exp()[..., None]).transpose(-1, -2)
    left = last.exp()[..., None]
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for n in range(q.shape[2]):
        update = u[:, :, n] - w[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + own[:, :, n] @ update)
        state = left[:, :, n] * state + k[:, :, n] @ update
    out = torch.stack(outputs, 2).flatten(2, 3)[:, :, :length]
    return out.transpose(1, 2), state


def normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class GatedDeltaNet(nn.Module):
    """Qwen3.5's recurrent layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        s = self.sizes = sizes
        keys = s.linear_key_heads * s.linear_key_dim
        values = s.linear_value_heads * s.linear_value_dim
        self.split = (keys, keys, values)
        self.in_proj_qkv = nn.Linear(s.hidden, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(s.hidden, values, bias=False)
        self.in_proj_b = nn.Linear(s.hidden, s.linear_value_heads, bias=False)
        self.in_proj_a = nn.Linear(s.hidden, s.linear_value_heads, bias=False)
        channels = 2 * keys + values
        self.conv1d = nn.Conv1d(channels, channels, s.taps, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(s.linear_value_heads))
        self.A_log = nn.Parameter(torch.zeros(s.linear_value_heads))
        self.norm = RMSNorm(s.linear_value_dim, s.eps)
        self.out_proj = nn.Linear(values, s.hidden, bias=False)
        with torch.no_grad():
            self.conv1d.weight.normal_(std=0.05)
            self.conv1d.weight[..., -1] += 0.7
            dt = torch.exp(torch.empty_like(self.dt_bias).uniform_(-6.9, -2.3))
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
            self.A_log.copy_(torch.empty_like(self.A_log).uniform_(1, 8).log())

    def inputs(self, x: Tensor, before: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """q, k, v, log decay, beta in float32, and the raw channels with those before them."""
        s, length = self.sizes, x.shape[1]
        raw = self.in_proj_qkv(x)
        if before is None:
            before = raw.new_zeros(x.shape[0], s.taps - 1, raw.shape[-1])
        raw = torch.cat([before, raw], 1)
        weight = self.conv1d.weight[:, 0].float()
        mixed = sum(raw[:, i : i + length].float() * weight[:, i] for i in range(s.taps))
        assert isinstance(mixed, Tensor)
        q, k, v = F.silu(mixed).split(self.split, -1)
        group = s.linear_value_heads // s.linear_key_heads
        q, k = (normalised(t.unflatten(-1, (s.linear_key_heads, -1))) for t in (q, k))
        q = q * s.linear_key_dim**-0.5
        q, k = (t.repeat_interleave(group, 2) for t in (q, k))
        v = v.unflatten(-1, (s.linear_value_heads, -1))
        step = self.in_proj_a(x).float() + self.dt_bias.float()
        step = torch.logaddexp(step, torch.zeros_like(step))  # softplus
        decay = -self.A_log.float().exp() * step
        return [q, k, v, decay, self.in_proj_b(x).float().sigmoid()], raw

    def outputs(self, out: Tensor, x: Tensor) -> Tensor:
        z = self.in_proj_z(x).unflatten(-1, out.shape[-2:])
        gated = self.norm(out) * F.silu(z.float())
        return self.out_proj(gated.flatten(-2).to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Whole texts [B, L, H]."""
        inputs, _ = self.inputs(x)
        with torch.autocast(x.device.type, enabled=False):
            out, _ = delta_rule(*inputs)
        return self.outputs(out, x)

    def step(self, x: Tensor, cache: list[Tensor | None]) -> Tensor:
        """The next rows. `cache` holds the last raw channels and the state, None at first."""
        inputs, raw = self.inputs(x, cache[0])
        cache[0] = raw[:, -(self.sizes.taps - 1) :].clone()
        with torch.autocast(x.device.type, enabled=False):
            if x.shape[1] > 1 or cache[1] is None:
                out, cache[1] = delta_rule(*inputs, cache[1])
            else:
                q, k, v, decay, beta = (t[:, 0] for t in inputs)
                state = cache[1].mul_(decay.exp()[..., None, None]).flatten(0, 1)
                known = (k.flatten(0, 1)[:, None] @ state)[:, 0].view_as(v)
                update = beta[..., None] * (v - known)
                state.baddbmm_(k.flatten(0, 1)[:, :, None], update.flatten(0, 1)[:, None])
                out = (q.flatten(0, 1)[:, None] @ state)[:, 0].view_as(v)[:, None]
        return self.outputs(out, x)


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.down_proj = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, sizes: Sizes, index: int) -> None:
        super().__init__()
        offset = float(sizes.hybrid)
        self.linear = sizes.is_linear(index)
        if self.linear:
            self.linear_attn = GatedDeltaNet(sizes)
        else:
            self.self_attn = Attention(sizes, gated=sizes.hybrid)
        self.mlp = MLP(sizes)
        self.input_layernorm = RMSNorm(sizes.hidden, sizes.eps, offset)
        self.post_attention_layernorm = RMSNorm(sizes.hidden, sizes.eps, offset)

    def mixer(self) -> Attention | GatedDeltaNet:
        return self.linear_attn if self.linear else self.self_attn

    def mix(self, x: Tensor) -> Tensor:
        return self.mixer()(self.input_layernorm(x))

    def feed(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(x + self.mix(x))


def initialise(module: nn.Module) -> None:
    """Normal weights; what writes to the residual stream is smaller."""
    small = ("o_proj", "out_proj", "down_proj")
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            std = 0.02 if "embed" in name else weight.shape[1] ** -0.5
            nn.init.normal_(weight, std=std * (0.3 if any(s in name for s in small) else 1))


class Target(nn.Module):
    """Qwen3ForCausalLM or Qwen3_5ForCausalLM, embeddings tied."""

    def __init__(self, sizes: Sizes, states: list[int]) -> None:
        """`states`: the layers whose outputs the drafter reads."""
        super().__init__()
        self.sizes, self.states = sizes, states
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(sizes.vocab, sizes.hidden),
                "layers": nn.ModuleList(Layer(sizes, i) for i in range(sizes.layers)),
                "norm": RMSNorm(sizes.hidden, sizes.eps, float(sizes.hybrid)),
            }
        )
        initialise(self)

    @property
    def embedding(self) -> Tensor:
        return self.model["embed_tokens"].weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, L] -> last hidden states [B, L, H], the drafter's features [B, L, S * H]."""
        x = F.embedding(ids, self.embedding)
        states = []
        for i, layer in enumerate(self.model["layers"]):
            x = layer(x)
            if i in self.states:
                states.append(x)
        return self.model["norm"](x), torch.cat(states, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.to(hidden.dtype))

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int, temperature: Tensor) -> Tensor:
        """ids [B, P], temperature [B] (0: greedy) -> [B, P + count]."""
        batch, prompt = ids.shape
        s = self.sizes
        out = torch.zeros(batch, prompt + count, dtype=torch.long, device=ids.device)
        out[:, :prompt] = ids
        shape = (batch, s.kv_heads, prompt + count, s.head_dim)
        dtype = torch.bfloat16 if ids.is_cuda else torch.float32
        caches: list[Any] = []
        for i in range(s.layers):
            if s.is_linear(i):
                caches.append([None, None])
            else:
                caches.append([torch.zeros(shape, device=ids.device, dtype=dtype) for _ in "kv"])

        def advance(rows: Tensor, start: int) -> Tensor:
            x = F.embedding(rows, self.embedding).to(dtype)
            for layer, cache in zip(self.model["layers"], caches, strict=True):
                h = layer.input_layernorm(x)
                if layer.linear:
                    x = x + layer.linear_attn.step(h, cache)
                else:
                    x = x + layer.self_attn.step(h, cache, start)
                x = layer.feed(x)
            return self.logits(self.model["norm"](x[:, -1])).float()

        logits = advance(ids, 0)
        for t in range(count):
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-9, 1 - 1e-7)))
            warm = logits / temperature[:, None].clamp(min=1e-3) + noise
            next_ids = torch.where(temperature[:, None] > 0, warm, logits).argmax(-1)
            out[:, prompt + t] = next_ids
            if t < count - 1:
                logits = advance(next_ids[:, None], prompt + t)
        return out


class Drafter(nn.Module):
    """DFlashDraftModel: a block of masks behind an anchor, on the target's states."""

    def __init__(self, sizes: Sizes, num_states: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(num_states * sizes.hidden, sizes.hidden, bias=False)
        self.hidden_norm = RMSNorm(sizes.hidden, sizes.eps)
        self.norm = RMSNorm(sizes.hidden, sizes.eps)
        self.layers = nn.ModuleList(Layer(sizes, i) for i in range(sizes.layers))
        self.mask_embedding = nn.Parameter(torch.zeros(sizes.hidden))
        initialise(self)
        nn.init.normal_(self.mask_embedding, std=0.02)

    def context(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features))

    def forward(
        self,
        features: Tensor,
        anchor_embeds: Tensor,
        anchors: Tensor,
        block: int,
        used: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, A, block, H] of one block for each anchor.

        Args:
            features: [B, L, S * H], the target's.
            anchor_embeds: [B, A, H], embeddings of the anchors' tokens.
            anchors: int [B, A], their positions. The context is what stands before.
            block: rows of a block, the anchor first.
            used: int scalar, rows that exist of it; None: all.

        """
        batch, length, _ = features.shape
        count, device = anchors.shape[1], features.device
        context = self.context(features)
        context_pos = torch.arange(length, device=device)[None].expand(batch, -1)
        masks = self.mask_embedding.to(anchor_embeds.dtype).expand(batch, count, block - 1, -1)
        x = torch.cat([anchor_embeds[:, :, None], masks], 2).reshape(batch, count * block, -1)
        offsets = torch.arange(block, device=device)
        positions = (anchors[:, :, None] + offsets).reshape(batch, count * block)
        before = context_pos[:, None] < anchors.repeat_interleave(block, 1)[:, :, None]
        number = torch.arange(count, device=device).repeat_interleave(block)
        same = number[:, None] == number[None]
        if used is not None:
            same = same & (torch.arange(count * block, device=device) % block < used)[None]
        mask = torch.cat([before, same.expand(batch, -1, -1)], -1)[:, None]
        for layer in self.layers:
            h, attention = layer.input_layernorm(x), layer.self_attn
            context_k, context_v = attention.keys(context, context_pos)
            k, v = attention.keys(h, positions)
            k, v = torch.cat([context_k, k], 2), torch.cat([context_v, v], 2)
            x = layer.feed(x + attention.mix(*attention.queries(h, positions), k, v, mask=mask))
        return self.norm(x).view(batch, count, block, -1)


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def read_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def sizes_of(config: dict[str, Any]) -> Sizes:
    """From a config.json of a target or drafter."""
    rope = config.get("rope_parameters") or {}
    head_dim = config["head_dim"]
    return Sizes(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        ffn=config["intermediate_size"],
        rotary_dim=int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        eps=config["rms_norm_eps"],
        linear_key_heads=config.get("linear_num_key_heads", 0),
        linear_value_heads=config.get("linear_num_value_heads", 0),
        linear_key_dim=config.get("linear_key_head_dim", 0),
        linear_value_dim=config.get("linear_value_head_dim", 0),
        taps=config.get("linear_conv_kernel_dim", 4),
        interval=config.get("full_attention_interval", 4),
    )


def load_target(folder: Path, states: list[int], device: str) -> Target:
    """A target in float32."""
    target = Target(sizes_of(read_config(folder)), states)
    weights = {name: weight.float() for name, weight in read_weights(folder).items()}
    target.load_state_dict(weights)
    return target.to(device)


def load_drafter(folder: Path, device: str) -> Drafter:
    """A DFlash drafter in float32, with its mask embedding."""
    config = read_config(folder)
    drafter = Drafter(sizes_of(config), len(config["dflash_config"]["target_layer_ids"]))
    weights = {name: weight.float() for name, weight in read_weights(folder).items()}
    mask = torch.load(folder / "mask_embedding.pt", weights_only=True)
    mask = mask["embedding"] if isinstance(mask, dict) else mask
    drafter.load_state_dict({**weights, "mask_embedding": mask.reshape(-1).float()})
    return drafter.to(device)
