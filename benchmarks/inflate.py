# SPDX-License-Identifier: Apache-2.0
"""Inflate a target and its DFlash drafter to a large shape: same function, the shape's cost.

usage: python -m benchmarks.inflate PAIR/small PAIR/small-dflash OUT [--shape qwen3-8b]

Writes OUT/target and OUT/drafter. They emit, draft and accept what the given pair does, at the
speed of the large shape. So a benchmark has the acceptance of a trained pair and the cost of a big
one. Nearly all weights and activations are nonzero, because a GPU that multiplies zeros draws less
power and runs faster.

A Qwen3 pair becomes a dense shape (qwen3-8b) or one with experts (qwen3-30b-a3b), a Qwen3.5 pair a
hybrid one (qwen3.5-9b). The drafter is a Qwen3 network in each case: DFlash, DFlash2, LiLiCorr or
DSpark.

How it works, where h is the small hidden size and H the large one:

- The residual stream holds n copies of the small one (n h <= H, n even), neighbours side by side.
  What writes to it has its rows copied. The remaining H - n h dimensions stay zero.
- Of these copies m, the largest power of two <= n, are *carriers*: what reads the stream has the
  small weights / m there, exact in bfloat16. The other copies are *twins*: two equal inputs with
  random weights r and -r, side by side, so that they cancel inside any split of a matrix product.
- RMSNorm over H sees rho = n h / H times the mean square, so its weights are scaled by sqrt(rho)
  and its eps by rho. In bfloat16 the m carriers round that weight up and down so that their mean is
  right to 2^-8 / m. Per-head norms share the eps: their outputs change by the share
  (1 - rho) eps / (2 mean square), 5e-8 in `small` at the Qwen3-8B shape. The outputs of a gated
  delta net can be so small that eps matters, so a hybrid keeps its eps. There the norms over H
  change instead, by the share (1 - rho) eps / (2 rho mean square).
- Added KV heads have random q and k, and v of twin dimensions, which o_proj reads with r and -r.
  Query heads added to an original KV head (only if the group grows) have random q and zeros in
  o_proj. Added heads of a gated delta net are twins as heads: two value heads of one key head.
  Added FFN units are twins. Added layers consist of added heads and units alone, after the
  original ones: they add zero. In a hybrid the kinds of layers go on in their order.
- Experts hold the same FFN, so it does not matter which of them a router takes. An FFN too large
  for one expert is cut (`wide_layers.experts`).
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

from benchmarks.wide_heads import (
    check_convolutions,
    wide_convolutions,
    wide_group,
    wide_heads,
)
from benchmarks.wide_layers import (
    Take,
    attention,
    delta_net,
    expert_parts,
    experts,
    feed_forward,
)
from benchmarks.widener import CONSTANT, Widener


@dataclass(frozen=True)
class Shape:
    """What to inflate to; head sizes, RoPE and the drafter's block size stay those of the pair."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int  # of one expert where there are experts
    draft_layers: int
    draft_states: int  # target states that the drafter reads
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    # 0: as the target
    draft_heads: int = 0
    draft_kv_heads: int = 0
    draft_ffn: int = 0

    @property
    def drafter(self) -> "Shape":
        """The drafter's own shape: a dense one."""
        return Shape(
            self.draft_layers,
            self.hidden,
            self.draft_heads or self.heads,
            self.draft_kv_heads or self.kv_heads,
            self.draft_ffn or self.ffn,
            self.draft_layers,
            self.draft_states,
            self.vocab,
        )


SHAPES = {
    "qwen3-8b": Shape(36, 4096, 32, 8, 12288, 5, 5, 151936),
    "qwen3-30b-a3b": Shape(48, 2048, 32, 4, 768, 5, 5, 151936, 128, 8, draft_ffn=6144),
    "qwen3.5-9b": Shape(
        32,
        4096,
        16,
        4,
        12288,
        5,
        5,
        248320,
        linear_key_heads=16,
        linear_value_heads=32,
        draft_heads=32,
        draft_kv_heads=8,
    ),
    "tiny": Shape(10, 832, 8, 2, 1536, 4, 4, 8704),
}


def is_hybrid(config: dict[str, Any]) -> bool:
    return "linear_attention" in config.get("layer_types", ())


def layer_types(config: dict[str, Any], layers: int) -> list[str]:
    """Kinds of the layers: those of the pair, then on in their order."""
    types = config.get("layer_types") or ["full_attention"]
    return [types[i % len(types)] for i in range(layers)]


def layer(
    widener: Widener,
    weights: dict[str, Tensor],
    prefix: str | None,
    config: dict[str, Any],
    shape: Shape,
    kind: str = "full_attention",
) -> dict[str, Tensor]:
    """One wide decoder layer, names without prefix; `prefix` None: one that adds nothing."""

    def taker(part: str) -> Take | None:
        def take(name: str) -> Tensor:
            full = f"{prefix}{part}{name}"
            return weights[full] if full in weights else weights[f"{full}.weight"]

        return None if prefix is None else take

    w, hybrid = widener, is_hybrid(config)
    if kind == "linear_attention":
        out = delta_net(
            w,
            taker("linear_attn."),
            config,
            shape.linear_key_heads,
            shape.linear_value_heads,
        )
    else:
        out = attention(w, taker("self_attn."), config, shape.heads, shape.kv_heads, hybrid)
    if shape.experts:
        old = config["intermediate_size"]
        out |= experts(w, taker("mlp."), shape.experts, shape.ffn, old)
    else:
        ffn = feed_forward(w, taker("mlp."), shape.ffn)
        out |= {f"mlp.{name}": weight for name, weight in ffn.items()}
    take = taker("")
    for name in ("input_layernorm", "post_attention_layernorm"):
        old_norm = None if take is None else take(name)
        out[f"{name}.weight"] = w.norm(old_norm, offset=float(hybrid))
    return out


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
        and (shape.experts or shape.ffn >= config["intermediate_size"])
        and shape.vocab >= config["vocab_size"]
    )
    if not fits:
        raise ValueError(f"{shape} is smaller than the pair")
    if shape.experts:
        parts = expert_parts(config["intermediate_size"], shape.ffn)
        if shape.experts % parts or shape.experts_per_token % parts:
            raise ValueError(f"numbers of experts must be multiples of {parts}")
    if is_hybrid(config) != bool(shape.linear_key_heads):
        raise ValueError("a shape with linear heads is for a hybrid pair, and no other is")
    if is_hybrid(config):
        old_keys, old_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        ratio = shape.linear_value_heads / shape.linear_key_heads
        if ratio != old_values / old_keys or ratio % 2 or shape.linear_key_heads < old_keys:
            raise ValueError(
                f"linear value heads over key heads must be {old_values / old_keys}, as in the "
                "pair, and even"
            )
        if config["num_hidden_layers"] % config.get("full_attention_interval", 4):
            raise ValueError("the pair must end with a whole period of layers")


def wide_config(config: dict[str, Any], shape: Shape, rho: float) -> dict[str, Any]:
    """config.json of the wide model."""
    hybrid = is_hybrid(config)
    out = {
        **config,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "max_window_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": False,
        "rms_norm_eps": config["rms_norm_eps"] * (1 if hybrid else rho),
    }
    if "layer_types" in config:
        out["layer_types"] = layer_types(config, shape.layers)
    if hybrid:
        out["linear_num_key_heads"] = shape.linear_key_heads
        out["linear_num_value_heads"] = shape.linear_value_heads
        del out["max_window_layers"]
    if shape.experts:
        out |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": shape.ffn,
            "norm_topk_prob": True,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "router_aux_loss_coef": 0.001,
        }
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
        offset = float(is_hybrid(config))
        norm = w.norm(weights["model.norm.weight"], final=True, offset=offset)
        return {"lm_head.weight": torch.cat(rows), "model.norm.weight": norm}

    kinds = layer_types(config, shape.layers)

    def make_layer(i: int) -> Part:
        source = f"model.layers.{i}." if i < config["num_hidden_layers"] else None
        return lambda: {
            f"model.layers.{i}.{name}": t
            for name, t in layer(w, weights, source, config, shape, kinds[i]).items()
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
            **wide_heads(w, weights, shape.vocab),
        }

    def make_layer(i: int) -> Part:
        source = f"layers.{i}." if i < config["num_hidden_layers"] else None

        def make() -> dict[str, Tensor]:
            parts = layer(w, weights, source, config, shape)
            if "conv_kernel_size" in config["dflash_config"]:
                parts |= wide_convolutions(w, weights, source, config["dflash_config"])
            return {f"layers.{i}.{name}": t for name, t in parts.items()}

        return make

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

    Raises ValueError if the shape cannot hold the pair, or the drafter has an output head of its
    own.
    """
    config, weights = read_folder(target)
    draft_config, draft_weights = read_folder(drafter)
    check(config, shape)
    check(draft_config, shape.drafter)
    ids = draft_config["dflash_config"]["target_layer_ids"]
    added_states = shape.draft_states - len(ids)
    added_layers = shape.layers - config["num_hidden_layers"]
    if not 0 <= added_states <= max(0, added_layers - 1):
        raise ValueError(f"{added_states} more states from {added_layers} added layers")
    if added_layers < 0 or shape.draft_layers < draft_config["num_hidden_layers"]:
        raise ValueError(f"{shape} has fewer layers than the pair")
    if "lm_head.weight" in draft_weights:
        raise ValueError("the drafter must share the target's output head")
    if config["rms_norm_eps"] != draft_config["rms_norm_eps"]:
        raise ValueError("target and drafter must have one rms_norm_eps")

    constant = shape.vocab > config["vocab_size"]
    widener = Widener(config["hidden_size"], shape.hidden, constant, dtype, device, seed)
    if "conv_group_size" in draft_config["dflash_config"]:
        check_convolutions(widener, draft_config["dflash_config"])
    name = str(dtype).removeprefix("torch.")
    total = write_folder(
        out / "target",
        {**wide_config(config, shape, widener.rho), "torch_dtype": name},
        target_parts(widener, config, weights, shape),
        target,
    )
    # States of added layers, spread over them; the last layer's output is not one of them.
    first = config["num_hidden_layers"]
    more = [first + added_layers * i // (added_states + 1) for i in range(1, added_states + 1)]
    dflash = {**draft_config["dflash_config"], "target_layer_ids": [*ids, *more]}
    if "conv_group_size" in dflash:
        dflash["conv_group_size"] = wide_group(widener, dflash)
    new_config = {
        **wide_config(draft_config, shape.drafter, widener.rho),
        "torch_dtype": name,
        "num_target_layers": shape.layers,
        "dflash_config": dflash,
    }
    if "target_layer_ids" in draft_config:  # DSpark
        new_config["target_layer_ids"] = dflash["target_layer_ids"]
    total += write_folder(
        out / "drafter",
        new_config,
        drafter_parts(widener, draft_config, draft_weights, shape.drafter),
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
