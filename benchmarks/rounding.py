# SPDX-License-Identifier: Apache-2.0
"""How far rounding alone moves a Qwen3 target's choices, in bfloat16 and with fp8 weights.

usage: python -m benchmarks.rounding TARGET [--prompts 48] [--tokens 192]

A simulation in PyTorch on the CPU. Every result rounds to bfloat16 as in vLLM; sums are float32.
With fp8, weights have one scale an output channel, and inputs of linear layers have one a token
(vLLM's `fp8_per_channel`). Forward passes that differ in attention alone read Python files:

once     all keys at once: what the others are compared with
tiles    64 keys after another, as in FlashAttention; nothing more is rounded
tree     as a tree's row attends: the keys before the last 0 to 6 rows, rounded to bfloat16, are
         merged with those of these rows

For each it prints how many tokens have another most probable successor, the largest gap between the
two in logits, and the root mean square of the logits' difference.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.prompts import python_prompts

SKIPPED = 64
"""First tokens of a text, which are not counted: their choices say little."""
KEY_TILE = 64
LONGEST_TAIL = 6
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(scores [heads, n, n] float32, visible [n, n] bool, values [heads, n, D]) -> [heads, n, D]."""


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def fp8(x: Tensor) -> Tensor:
    """Rounded to e4m3 with one scale a row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return bf16(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)


def part(scores: Tensor, visible: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the visible keys: sum of values, of weights, and the largest score."""
    scores = scores.masked_fill(~visible, -1e30)
    best = scores.amax(-1, keepdim=True)
    weights = (scores - best).exp().masked_fill(~visible, 0.0)
    return bf16(weights) @ values, weights.sum(-1, keepdim=True), best


def once(scores: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    out, total, _ = part(scores, visible, values)
    return out / total


def merged(parts: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """One softmax of several parts."""
    best = torch.stack([best for *_, best in parts]).amax(0)
    factors = [(b - best).exp() for *_, b in parts]
    out = torch.stack([o * f for (o, *_), f in zip(parts, factors, strict=True)]).sum(0)
    return out / torch.stack([t * f for (_, t, _), f in zip(parts, factors, strict=True)]).sum(0)


def tiles(scores: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    keys = torch.arange(scores.shape[-1])
    firsts = range(0, len(keys), KEY_TILE)
    spans = [(keys >= first) & (keys < first + KEY_TILE) for first in firsts]
    return merged([part(scores, visible & span, values) for span in spans])


def tree(roots: Tensor) -> Attention:
    """Row i's tail begins at roots[i]."""

    def attend(scores: Tensor, visible: Tensor, values: Tensor) -> Tensor:
        before = torch.arange(len(roots)) < roots[:, None]
        out, total, best = part(scores, visible & before, values)
        rounded = bf16(out / total.clamp(min=1e-30)) * total
        return merged([(rounded, total, best), part(scores, visible & ~before, values)])

    return attend


class Target:
    """A Qwen3ForCausalLM checkpoint; `quantise` rounds what a linear layer multiplies."""

    def __init__(self, folder: Path, quantise: Callable[[Tensor], Tensor]) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.quantise = quantise
        self.weights = {
            name: (quantise if "_proj" in name else bf16)(tensor.float())
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }

    def linear(self, x: Tensor, name: str) -> Tensor:
        return bf16(self.quantise(x) @ self.weights[name].T)

    def rotate(self, x: Tensor) -> Tensor:
        """RoPE of x [n, heads, D]."""
        dim = self.config["head_dim"]
        rope = self.config.get("rope_parameters") or self.config
        frequency = rope["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        angle = torch.arange(len(x))[:, None] * frequency
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.chunk(2, -1)
        return bf16(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))

    def logits(self, ids: Tensor, attend: Attention) -> Tensor:
        """[n, vocab] of one text of n tokens."""
        config, weights, n = self.config, self.weights, len(ids)
        eps, dim = config["rms_norm_eps"], config["head_dim"]
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        x = weights["model.embed_tokens.weight"][ids]
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}.%s.weight"
            h = rms_norm(x, weights[name % "input_layernorm"], eps)
            q, k, v = (self.linear(h, name % f"self_attn.{p}_proj").view(n, -1, dim) for p in "qkv")
            q = self.rotate(rms_norm(q, weights[name % "self_attn.q_norm"], eps))
            k = self.rotate(rms_norm(k, weights[name % "self_attn.k_norm"], eps))
            k, v = (t.repeat_interleave(group, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
            out = bf16(attend(scores, visible, v.transpose(0, 1))).transpose(0, 1).flatten(1)
            x = bf16(x + self.linear(out, name % "self_attn.o_proj"))
            h = rms_norm(x, weights[name % "post_attention_layernorm"], eps)
            gate, up = (self.linear(h, name % f"mlp.{p}_proj") for p in ("gate", "up"))
            x = bf16(x + self.linear(bf16(bf16(F.silu(gate)) * up), name % "mlp.down_proj"))
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        return bf16(rms_norm(x, weights["model.norm.weight"], eps) @ head.T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=192)
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.target)
    texts = torch.tensor(python_prompts(tokenizer, args.prompts, args.tokens, 5))
    for label, quantise in (("bfloat16", bf16), ("fp8 weights", fp8)):
        target, generator = Target(args.target, quantise), random.Random(0)
        found: dict[str, list[Tensor]] = {"tiles": [], "tree": []}
        squares = dict.fromkeys(found, 0.0)
        for ids in texts:
            tails = [generator.randint(0, LONGEST_TAIL) for _ in ids]
            roots = (torch.arange(len(ids)) - torch.tensor(tails)).clamp(min=0)
            wanted = target.logits(ids, once)[SKIPPED:]
            for name, attend in (("tiles", tiles), ("tree", tree(roots))):
                got = target.logits(ids, attend)[SKIPPED:]
                choice = got.argmax(-1, keepdim=True)
                found[name].append(wanted.amax(-1) - wanted.gather(1, choice)[:, 0])
                squares[name] += float((got - wanted).square().mean()) / len(texts)
        for name, gaps in found.items():
            gap = torch.cat(gaps)
            print(
                f"{label}, {name}: {int((gap > 0).sum())} of {len(gap)} choices differ, largest "
                f"gap {float(gap.max()):.3f}, logits apart by {squares[name] ** 0.5:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
