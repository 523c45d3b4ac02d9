# SPDX-License-Identifier: Apache-2.0
"""Wide decoder layers that do what narrow ones do, and ones that add nothing.

Each function gives the weights of one part. `take` gives the narrow part's weights by name; None:
there is none, and the part adds zero. See benchmarks/inflate.py for the method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.widener import Widener

Take = Callable[[str], Tensor]


def attention(
    w: Widener,
    take: Take | None,
    config: dict[str, Any],
    heads: int,
    kv_heads: int,
    gated: bool,
) -> dict[str, Tensor]:
    """`self_attn`, if `gated` with a gate behind each query head, as in Qwen3.5.

    Values of added KV heads come in equal pairs, and so must the gates of their query heads.
    """
    dim, group = config["head_dim"], heads // kv_heads
    std = w.wide**-0.5
    q = w.random(heads * dim, w.wide, std).view(heads, dim, w.wide)
    gates = w.doubled(heads * dim).view(heads, dim, w.wide) if gated else None
    k = w.random(kv_heads * dim, w.wide, std)
    v = w.doubled(kv_heads * dim)
    o = w.writes_nothing(heads * dim)
    zero_weight = torch.zeros(dim, dtype=w.dtype) if gated else torch.ones(dim, dtype=w.dtype)
    norms = {name: zero_weight.clone() for name in ("q_norm", "k_norm")}
    if take is not None:
        old_kv = config["num_key_value_heads"]
        old_group = config["num_attention_heads"] // old_kv
        old_q = take("q_proj").view(old_kv * old_group, -1, w.narrow)
        old_o = take("o_proj")
        for kv in range(old_kv):
            for i in range(old_group):
                old, new = kv * old_group + i, kv * group + i
                q[new] = w.reads(old_q[old, :dim])
                if gates is not None:
                    gates[new] = w.reads(old_q[old, dim:])
            first = kv * group * dim
            o[:, first : first + group * dim] = 0  # query heads added to this group: no twins in v
            columns = slice(kv * old_group * dim, (kv + 1) * old_group * dim)
            o[:, first : first + old_group * dim] = w.writes(old_o[:, columns])
        k[: old_kv * dim] = w.reads(take("k_proj"))
        v[: old_kv * dim] = w.reads(take("v_proj"))
        norms = {name: take(name).to(w.dtype) for name in norms}
    q = q if gates is None else torch.cat([q, gates], 1)
    parts = {"q_proj": q.flatten(0, 1), "k_proj": k, "v_proj": v, "o_proj": o, **norms}
    return {f"self_attn.{name}.weight": weight for name, weight in parts.items()}


def delta_net(
    w: Widener, take: Take | None, config: dict[str, Any], key_heads: int, value_heads: int
) -> dict[str, Tensor]:
    """`linear_attn`, a gated delta net.

    Value heads 2i and 2i + 1 share a key head. Where they are added, all else of them is equal as
    well, so their outputs are, and out_proj reads them with r and -r.
    """
    key_dim, dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    taps = config["linear_conv_kernel_dim"]
    keys, values = key_heads * key_dim, value_heads * dim
    std, device = w.wide**-0.5, w.device

    def pairs(size: int) -> Tensor:
        """Random rows [value_heads * size, wide], equal for heads 2i and 2i + 1."""
        half = w.random(value_heads // 2 * size, w.wide, std).view(-1, size, w.wide)
        return half.repeat_interleave(2, 0).flatten(0, 1)

    def of_heads(low: float, high: float) -> Tensor:
        half = torch.rand(value_heads // 2, generator=w.generator, device=device)
        return (low + (high - low) * half).repeat_interleave(2)

    qk = [w.random(keys, w.wide, std) for _ in "qk"]
    v, z, b, a = pairs(dim), pairs(dim), pairs(1), pairs(1)
    conv_qk = [w.random(keys, taps, 0.5) for _ in "qk"]
    conv_v = w.random(value_heads // 2 * dim, taps, 0.5).view(-1, dim, taps)
    conv_v = conv_v.repeat_interleave(2, 0).flatten(0, 1)
    decay, step = of_heads(0.0, 2.0), of_heads(-6.0, -2.0)
    o = w.random(w.wide, values // 2, values**-0.5).view(w.wide, -1, 1, dim)
    if w.constant:
        o[-1] = 0
    o = torch.cat([o, -o], 2).flatten(1)
    norm = torch.ones(dim, dtype=w.dtype)
    if take is not None:
        old_keys = config["linear_num_key_heads"] * key_dim
        old_heads = config["linear_num_value_heads"]
        split = [old_keys, old_keys, old_heads * dim]
        old_qkv, old_conv = take("in_proj_qkv").split(split), take("conv1d").squeeze(1).split(split)
        for new, conv, weight, old in zip(qk, conv_qk, old_qkv, old_conv, strict=False):
            new[:old_keys] = w.reads(weight)
            conv[:old_keys] = old.to(device, w.dtype)
        v[: old_heads * dim] = w.reads(old_qkv[2])
        conv_v[: old_heads * dim] = old_conv[2].to(device, w.dtype)
        z[: old_heads * dim] = w.reads(take("in_proj_z"))
        b[:old_heads], a[:old_heads] = w.reads(take("in_proj_b")), w.reads(take("in_proj_a"))
        o[:, : old_heads * dim] = w.writes(take("out_proj"))
        decay[:old_heads], step[:old_heads] = take("A_log").to(device), take("dt_bias").to(device)
        norm = take("norm").to(w.dtype)
    parts = {
        "in_proj_qkv.weight": torch.cat([*qk, v]),
        "in_proj_z.weight": z,
        "in_proj_b.weight": b,
        "in_proj_a.weight": a,
        "conv1d.weight": torch.cat([*conv_qk, conv_v])[:, None],
        "A_log": decay.float(),
        "dt_bias": step.to(w.dtype),
        "norm.weight": norm,
        "out_proj.weight": o,
    }
    return {f"linear_attn.{name}": weight for name, weight in parts.items()}


def feed_forward(w: Widener, take: Take | None, size: int) -> dict[str, Tensor]:
    """A gated FFN of `size` units: gate_proj, up_proj, down_proj."""
    gate, up, down = w.doubled(size), w.doubled(size), w.writes_nothing(size)
    if take is not None:
        old = take("up_proj").shape[0]
        gate[:old] = w.reads(take("gate_proj"))
        up[:old] = w.reads(take("up_proj"))
        down[:, :old] = w.writes(take("down_proj"))
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"{name}.weight": weight for name, weight in parts.items()}


def expert_parts(ffn: int, expert_ffn: int) -> int:
    """Experts that hold one copy of an FFN, a power of two."""
    parts = 1
    while parts * expert_ffn < ffn or ffn % (2 * parts):
        parts *= 2
        if parts > ffn:
            raise ValueError(f"an FFN of {ffn} units cannot be cut into parts of {expert_ffn}")
    return parts


def experts(
    w: Widener, take: Take | None, count: int, size: int, old_size: int
) -> dict[str, Tensor]:
    """`mlp` of Qwen3Moe: `count` experts of `size` units and a random router.

    An FFN too large for one expert is cut into n parts. Then n neighbours hold one part each and
    share a row of the router, so that a token takes all n or none: their logits are equal, and of
    equal logits a router takes the smaller index first. Weights of the chosen sum to 1, so each
    part is read n times as large.
    """
    parts = expert_parts(old_size, size)
    part = old_size // parts
    router = w.random(count // parts, w.wide, w.wide**-0.5).repeat_interleave(parts, 0)
    out = {"mlp.gate.weight": router}
    real: list[dict[str, Tensor]] = []
    if take is not None:
        for i in range(parts):
            rows = slice(i * part, (i + 1) * part)
            real.append(
                {
                    "gate_proj": w.reads(take("gate_proj")[rows]),
                    "up_proj": w.reads(take("up_proj")[rows]),
                    "down_proj": w.writes(take("down_proj")[:, rows] * parts),
                }
            )
    for expert in range(count):
        weights = feed_forward(w, None, size)
        for name, weight in real[expert % parts].items() if real else ():
            whole = weights[f"{name}.weight"]
            (whole[:, :part] if name == "down_proj" else whole[:part]).copy_(weight)
        out |= {f"mlp.experts.{expert}.{name}": weight for name, weight in weights.items()}
    return out
