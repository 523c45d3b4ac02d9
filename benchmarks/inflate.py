# SPDX-License-Identifier: Apache-2.0
"""Inflate a target and its DFlash drafter to a large shape: same function, the shape's cost.

usage: python -m benchmarks.inflate PAIR/small PAIR/small-dflash OUT [--shape qwen3-8b]

Writes OUT/target and OUT/drafter. They emit, draft and accept what the given pair does, at the
speed of the large shape. So a benchmark has the acceptance of a trained pair and the cost of a big
one. Nearly all weights and activations are nonzero, because a GPU that multiplies zeros draws less
power and runs faster.

How it works, where h is the small hidden size and H the large one:

- The residual stream holds n copies of the small one (n h <= H, n even), neighbours side by side.
  What writes to it has its rows copied. The remaining H - n h dimensions stay zero.
- Of these copies m, the largest power of two <= n, are *carriers*: what reads the stream has the
  small weights / m there, exact in bfloat16. The other copies are *twins*: two equal inputs with
  random weights r and -r, side by side, so that they cancel inside any split of a matrix product.
- RMSNorm over H sees rho = n h / H times the mean square, so its weights are scaled by sqrt(rho)
  and its eps by rho. In bfloat16 the m carriers round that weight up and down so that their mean is
  right to 2^-8 / m. Per-head norms share the eps: their outputs change by the share
  (1 - rho) eps / (2 mean square), 5e-8 in `small` at the Qwen3-8B shape.
- Added KV heads have random q and k, and v of twin dimensions, which o_proj reads with r and -r.
  Query heads added to an original KV head (only if the group grows) have random q and zeros in
  o_proj. Added FFN units are twins. Added layers consist of added heads and units alone, after the
  original ones: they add zero.
- The drafter's fc may read states of added layers too: twins again.
- Added tokens must never win, so they need an input of constant sign. The last dimension of the
  stream is 2^-12 for every token (nothing else writes there; 1e-8 of the mean square). All norms
  but the final ones have weight 0 there, so that what reads it can be random. Behind a final norm
  it is 1 / rms of the stream, and an added token's logit is at most -40 as long as that rms is
  below 100 (`small`: 2.4 to 9.8; its logits' log-sum-exp is at least 7.6).
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONSTANT = 2.0**-12  # the constant dimension
FLOOR = 40.0  # an added token's logit is at most -FLOOR
MAX_RMS = 100.0  # while the rms of the stream is at most this


@dataclass(frozen=True)
class Shape:
    """What to inflate to; head_dim, RoPE and the drafter's block size stay those of the pair."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    draft_layers: int
    draft_states: int  # target states that the drafter reads
    vocab: int


SHAPES = {
    "qwen3-8b": Shape(36, 4096, 32, 8, 12288, 5, 5, 151936),
    "tiny": Shape(10, 832, 8, 2, 1536, 4, 4, 8704),
}


class Widener:
    """Makes wide weights from narrow ones, and random ones that change nothing.

    Matrices are [out, in] as in checkpoints. Results are `dtype`, on `device`.
    """

    def __init__(
        self,
        narrow: int,
        wide: int,
        constant: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int = 0,
    ) -> None:
        """`constant` reserves the last dimension. Raises ValueError if `wide` is too small."""
        copies = (wide - 1 if constant else wide) // narrow
        if copies < 1:
            raise ValueError(f"hidden size {wide} is too small for {narrow}")
        self.copies = copies = copies - copies % 2 if copies > 1 else 1
        self.carriers = 1 << (copies.bit_length() - 1)
        self.narrow, self.wide, self.constant = narrow, wide, constant
        self.dtype, self.device = dtype, torch.device(device)
        self.rho = copies * narrow / wide
        self.generator = torch.Generator(self.device).manual_seed(seed)
        # [copies, narrow]: where copy i of dimension j stands. Copies 2p and 2p + 1 are neighbours.
        copy, dim = torch.arange(copies)[:, None], torch.arange(narrow)[None]
        pair = min(2, copies)
        index = copy // pair * pair * narrow + dim * pair + copy % pair
        self.index = index.to(self.device)

    def random(self, rows: int, columns: int, std: float) -> Tensor:
        """Normal numbers [rows, columns]."""
        out = torch.randn(rows, columns, generator=self.generator, device=self.device)
        return out.mul_(std).to(self.dtype)

    def twins(self, rows: int, columns: int, std: float) -> Tensor:
        """[rows, columns], columns 2i and 2i + 1 opposite; an odd last one is zero."""
        half = self.random(rows, columns // 2, std)
        out = torch.zeros(rows, columns, dtype=self.dtype, device=self.device)
        out[:, 0 : columns - 1 : 2] = half
        out[:, 1::2] = -half
        return out

    def reads(self, weight: Tensor) -> Tensor:
        """What reads the stream: [out, narrow] -> [out, wide], zero for the constant dimension."""
        out = self.reads_nothing(weight.shape[0])
        part = (weight.to(self.device, torch.float32) / self.carriers).to(self.dtype)
        for copy in range(self.carriers):
            out[:, self.index[copy]] = part
        return out

    def reads_nothing(self, rows: int) -> Tensor:
        """[rows, wide] that gives zero; random but for the constant dimension."""
        std, end = self.wide**-0.5, self.copies * self.narrow
        out = self.random(rows, self.wide, std)
        out[:, :end] = self.twins(rows, end, std) if self.copies > 1 else 0
        if self.constant:
            out[:, -1] = 0
        return out

    def writes(self, weight: Tensor) -> Tensor:
        """What writes to the stream: [narrow, in] -> [wide, in]."""
        out = torch.zeros(self.wide, weight.shape[1], dtype=self.dtype, device=self.device)
        for copy in range(self.copies):
            out[self.index[copy]] = weight.to(self.device, self.dtype)
        return out

    def writes_nothing(self, columns: int) -> Tensor:
        """[wide, columns] over inputs that come as twins."""
        out = self.twins(self.wide, columns, columns**-0.5)
        if self.constant:
            out[-1] = 0
        return out

    def norm(self, weight: Tensor | None, final: bool = False) -> Tensor:
        """RMSNorm weights [narrow] -> [wide]; None: those of an added layer."""
        out = torch.ones(self.wide, dtype=self.dtype, device=self.device)
        if weight is not None:
            exact = weight.to(self.device, torch.float64) * self.rho**0.5
            out[self.index.flatten()] = exact.to(self.dtype).repeat(self.copies)
            rest = exact * self.carriers
            for copy in range(self.carriers):  # each rounds what the ones before left
                rounded = (rest / (self.carriers - copy)).to(self.dtype)
                out[self.index[copy]] = rounded
                rest -= rounded
        if self.constant:
            out[-1] = 1 / CONSTANT if final else 0.0
        return out

    def token_logit(self) -> float:
        """Weight of the constant dimension that keeps an added token's logit below -FLOOR."""
        return -FLOOR * MAX_RMS * self.rho**0.5


def layer(
    widener: Widener,
    weights: dict[str, Tensor],
    prefix: str | None,
    config: dict[str, Any],
    shape: Shape,
) -> dict[str, Tensor]:
    """One wide decoder layer, names without prefix; `prefix` None: one that adds nothing."""
    w, dim = widener, config["head_dim"]
    std = w.wide**-0.5
    heads, kv_heads = shape.heads, shape.kv_heads
    group = heads // kv_heads
    q = w.random(heads * dim, w.wide, std)
    k = w.random(kv_heads * dim, w.wide, std)
    v = w.random(kv_heads * dim // 2, w.wide, std).repeat_interleave(2, 0)
    o = w.writes_nothing(heads * dim)
    gate = w.random(shape.ffn // 2, w.wide, std).repeat_interleave(2, 0)
    up = w.random(shape.ffn // 2, w.wide, std).repeat_interleave(2, 0)
    down = w.writes_nothing(shape.ffn)
    names = ("input_layernorm", "post_attention_layernorm")
    if prefix is None:
        norms = {name: w.norm(None) for name in names}
        heads_norms = {n: torch.ones(dim, dtype=w.dtype) for n in ("q_norm", "k_norm")}
    else:

        def take(name: str) -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        old_kv = config["num_key_value_heads"]
        old_group = config["num_attention_heads"] // old_kv
        old_q, old_o = take("self_attn.q_proj"), take("self_attn.o_proj")
        for kv in range(old_kv):
            old = slice(kv * old_group * dim, (kv + 1) * old_group * dim)
            first = kv * group * dim
            new = slice(first, first + old_group * dim)
            q[new] = w.reads(old_q[old])
            o[:, first : first + group * dim] = 0  # query heads added to this group: no twins in v
            o[:, new] = w.writes(old_o[:, old])
        k[: old_kv * dim] = w.reads(take("self_attn.k_proj"))
        v[: old_kv * dim] = w.reads(take("self_attn.v_proj"))
        ffn = config["intermediate_size"]
        gate[:ffn] = w.reads(take("mlp.gate_proj"))
        up[:ffn] = w.reads(take("mlp.up_proj"))
        down[:, :ffn] = w.writes(take("mlp.down_proj"))
        norms = {name: w.norm(take(name)) for name in names}
        heads_norms = {n: take(f"self_attn.{n}").to(w.dtype) for n in ("q_norm", "k_norm")}
    parts = {
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": o,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": down,
        **norms,
        **{f"self_attn.{name}": weight for name, weight in heads_norms.items()},
    }
    return {f"{name}.weight": weight for name, weight in parts.items()}


def check(config: dict[str, Any], shape: Shape) -> None:
    """Raises ValueError if `shape` cannot hold a model of this config."""
    old_kv = config["num_key_value_heads"]
    old_group = config["num_attention_heads"] // old_kv
    # Twins come in pairs.
    if shape.heads % shape.kv_heads or shape.ffn % 2 or config["intermediate_size"] % 2:
        raise ValueError("heads must be a multiple of KV heads, and FFN widths even")
    if config["head_dim"] % 2 or config.get("attention_bias"):
        raise ValueError("head_dim must be even, and attention without biases")
    fits = (
        shape.kv_heads >= old_kv
        and shape.heads // shape.kv_heads >= old_group
        and shape.ffn >= config["intermediate_size"]
        and shape.vocab >= config["vocab_size"]
    )
    if not fits:
        raise ValueError(f"{shape} is smaller than the pair")


def wide_config(config: dict[str, Any], shape: Shape, layers: int, rho: float) -> dict[str, Any]:
    """config.json of the wide model."""
    out = {
        **config,
        "hidden_size": shape.hidden,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": False,
        "rms_norm_eps": config["rms_norm_eps"] * rho,
    }
    if "layer_types" in config:
        out["layer_types"] = ["full_attention"] * layers
    return out


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint's config and weights."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return json.loads((folder / "config.json").read_text()), weights


Part = Callable[[], dict[str, Tensor]]


def target_parts(
    widener: Widener, config: dict[str, Any], weights: dict[str, Tensor], shape: Shape
) -> Iterator[Part]:
    """The wide target, in pieces small enough to hold on a GPU."""
    w = widener
    embed = weights["model.embed_tokens.weight"]
    head = embed if config.get("tie_word_embeddings") else weights["lm_head.weight"]
    added = shape.vocab - config["vocab_size"]

    def make_embedding() -> dict[str, Tensor]:
        rows = torch.cat([w.writes(embed.T).T, w.random(added, w.wide, float(embed.std()))])
        if w.constant:
            rows[:, -1] = CONSTANT
        return {"model.embed_tokens.weight": rows}

    def make_head() -> dict[str, Tensor]:
        rows = [w.reads(head)]
        if added:
            never = w.reads_nothing(added)
            spread = torch.rand(added, generator=w.generator, device=w.device)
            never[:, -1] = (w.token_logit() * (1 + spread / 2)).to(w.dtype)
            rows.append(never)
        norm = w.norm(weights["model.norm.weight"], final=True)
        return {"lm_head.weight": torch.cat(rows), "model.norm.weight": norm}

    def make_layer(i: int) -> Part:
        source = f"model.layers.{i}." if i < config["num_hidden_layers"] else None
        return lambda: {
            f"model.layers.{i}.{name}": t
            for name, t in layer(w, weights, source, config, shape).items()
        }

    yield make_embedding
    yield from (make_layer(i) for i in range(shape.layers))
    yield make_head


def drafter_parts(
    widener: Widener, config: dict[str, Any], weights: dict[str, Tensor], shape: Shape
) -> Iterator[Part]:
    """The wide drafter."""
    w = widener
    states = len(config["dflash_config"]["target_layer_ids"])

    def make_ends() -> dict[str, Tensor]:
        fc = weights["fc.weight"]
        blocks = [w.writes(w.reads(block)) for block in fc.split(w.narrow, dim=1)]
        blocks += [w.writes(w.reads_nothing(w.narrow)) for _ in range(shape.draft_states - states)]
        return {
            "fc.weight": torch.cat(blocks, dim=1),
            "hidden_norm.weight": w.norm(weights["hidden_norm.weight"]),
            "norm.weight": w.norm(weights["norm.weight"], final=True),
        }

    def make_layer(i: int) -> Part:
        source = f"layers.{i}." if i < config["num_hidden_layers"] else None
        return lambda: {
            f"layers.{i}.{name}": t for name, t in layer(w, weights, source, config, shape).items()
        }

    yield make_ends
    yield from (make_layer(i) for i in range(shape.draft_layers))


def write_folder(
    folder: Path, config: dict[str, Any], parts: Iterator[Part], copy_from: Path
) -> int:
    """A sharded checkpoint, one part a file, written while the next part is made. Returns bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (copy_from / name).exists():
            shutil.copy(copy_from / name, folder / name)
    todo = list(parts)
    names: dict[str, str] = {}
    total = 0
    with ThreadPoolExecutor(4) as pool:
        running: list[Future[None]] = []
        for number, part in enumerate(todo, 1):
            tensors = {name: t.contiguous().cpu() for name, t in part().items()}
            file = f"model-{number:05d}-of-{len(todo):05d}.safetensors"
            names |= dict.fromkeys(tensors, file)
            total += sum(t.nbytes for t in tensors.values())
            if len(running) >= 4:  # bounds the memory
                running.pop(0).result()
            running.append(pool.submit(save_file, tensors, folder / file, {"format": "pt"}))
        for future in running:
            future.result()
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return total


def inflate(
    target: Path,
    drafter: Path,
    out: Path,
    shape: Shape,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> int:
    """Write out/target and out/drafter. Returns bytes written.

    Raises ValueError if the shape cannot hold the pair, or the drafter has an embedding or a head
    of its own.
    """
    config, weights = read_folder(target)
    draft_config, draft_weights = read_folder(drafter)
    check(config, shape)
    check(draft_config, shape)
    ids = draft_config["dflash_config"]["target_layer_ids"]
    added_states = shape.draft_states - len(ids)
    added_layers = shape.layers - config["num_hidden_layers"]
    if not 0 <= added_states <= max(0, added_layers - 1):
        raise ValueError(f"{added_states} more states from {added_layers} added layers")
    if added_layers < 0 or shape.draft_layers < draft_config["num_hidden_layers"]:
        raise ValueError(f"{shape} has fewer layers than the pair")
    if {"embed_tokens.weight", "lm_head.weight"} & set(draft_weights):
        raise ValueError("the drafter must share the target's embedding and head")
    if config["rms_norm_eps"] != draft_config["rms_norm_eps"]:
        raise ValueError("target and drafter must have one rms_norm_eps")

    constant = shape.vocab > config["vocab_size"]
    widener = Widener(config["hidden_size"], shape.hidden, constant, dtype, device, seed)
    name = str(dtype).removeprefix("torch.")
    total = write_folder(
        out / "target",
        {**wide_config(config, shape, shape.layers, widener.rho), "torch_dtype": name},
        target_parts(widener, config, weights, shape),
        target,
    )
    # States of added layers, spread over them; the last layer's output is not one of them.
    first = config["num_hidden_layers"]
    more = [first + added_layers * i // (added_states + 1) for i in range(1, added_states + 1)]
    new_config = {
        **wide_config(draft_config, shape, shape.draft_layers, widener.rho),
        "torch_dtype": name,
        "num_target_layers": shape.layers,
        "dflash_config": {**draft_config["dflash_config"], "target_layer_ids": [*ids, *more]},
    }
    total += write_folder(
        out / "drafter",
        new_config,
        drafter_parts(widener, draft_config, draft_weights, shape),
        drafter,
    )
    if (drafter / "mask_embedding.pt").exists():
        saved = torch.load(drafter / "mask_embedding.pt", weights_only=True)
        row = saved["embedding"] if isinstance(saved, dict) else saved
        row = widener.writes(row.reshape(-1, 1)).T.contiguous().cpu()[0]
        if constant:
            row[-1] = CONSTANT
        saved = {**saved, "embedding": row} if isinstance(saved, dict) else row
        torch.save(saved, out / "drafter" / "mask_embedding.pt")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    for field in fields(Shape):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=int, help="instead of the shape's")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    given = {f.name: value for f in fields(Shape) if (value := getattr(args, f.name)) is not None}
    shape = replace(SHAPES[args.shape], **given)
    started = time.perf_counter()
    dtype = getattr(torch, args.dtype)
    total = inflate(args.target, args.drafter, args.out, shape, dtype, args.device, args.seed)
    seconds = time.perf_counter() - started
    print(f"{shape}: {total / 1e9:.2f} GB in {seconds:.1f} s")


if __name__ == "__main__":
    main()
