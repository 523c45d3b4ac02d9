# SPDX-License-Identifier: Apache-2.0
"""Train a hybrid target (Qwen3.5: three gated delta nets to one attention) and its DFlash drafter.

usage: python -m benchmarks.training.hybrid small TARGET DRAFTER CORPUS.npz OUT
           --target-until TIME --until TIME

The trained Qwen3 target gives embeddings, norms, FFNs and, as far as they fit, attention layers.
First each layer learns to give what the teacher's attention gave for the same input; then the whole
network learns the teacher's distributions and the text. The drafter starts from the teacher's.
Writes OUT/NAME-hybrid, OUT/NAME-hybrid-dflash and OUT/NAME-hybrid.json. Times are seconds since
1970, so that scripts which run side by side end together.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.training.common import (
    DEVICE,
    adamw,
    autocast,
    beside_corpus,
    compiled,
    generate,
    held_out,
    load_tokens,
    rounded,
    save_checkpoint,
    save_dflash,
    say,
    schedule,
    setup,
    steps,
    to_bfloat16,
    train_drafter,
    update,
    windows,
    with_features,
)
from benchmarks.training.measure import measure_dflash
from benchmarks.training.nets import (
    Attention,
    Layer,
    Sizes,
    Target,
    load_drafter,
    load_target,
    read_config,
    sizes_of,
)
from benchmarks.training.oracle import table

# What differs from the teacher.
HYBRIDS = {
    "small": {
        "head_dim": 256,
        "rotary_dim": 64,
        "linear_key_heads": 2,
        "linear_value_heads": 4,
        "linear_key_dim": 128,
        "linear_value_dim": 128,
    },
    "nano": {
        "rotary_dim": 16,
        "ffn": 256,
        "linear_key_heads": 1,
        "linear_value_heads": 2,
        "linear_key_dim": 64,
        "linear_value_dim": 64,
    },
}
MAX_POSITIONS = 32768


def config_of(sizes: Sizes) -> dict[str, Any]:
    """config.json of the target, as Qwen3_5TextConfig names things."""
    kinds = ["linear_attention", "full_attention"]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "full_attention_interval": sizes.interval,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "initializer_range": 0.02,
        "intermediate_size": sizes.ffn,
        "layer_types": [kinds[not sizes.is_linear(i)] for i in range(sizes.layers)],
        "linear_conv_kernel_dim": sizes.taps,
        "linear_key_head_dim": sizes.linear_key_dim,
        "linear_num_key_heads": sizes.linear_key_heads,
        "linear_num_value_heads": sizes.linear_value_heads,
        "linear_value_head_dim": sizes.linear_value_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": sizes.eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": sizes.theta,
            "partial_rotary_factor": sizes.rotary_dim / sizes.head_dim,
        },
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": sizes.vocab,
    }


@torch.no_grad()
def copy_attention(new: Attention, old: Attention) -> None:
    """Start a gated attention layer from a plain one.

    Of the old pairs that RoPE turns, every n-th has the frequency of a new one. The other pairs
    become dimensions without RoPE. What is left of a larger head begins small.
    """
    dim, old_dim, rotary = new.sizes.head_dim, old.sizes.head_dim, new.sizes.rotary_dim
    half, every = old_dim // 2, old_dim // rotary
    turned = torch.arange(0, half, every)
    rest = torch.tensor([i for i in range(half) if i % every])
    order = torch.cat([turned, turned + half, rest, rest + half])
    scale = (old_dim / dim) ** 0.25  # of scores, which a head of another size sees larger

    def heads(weight: Tensor, count: int) -> Tensor:
        out = 0.02 * torch.randn(count, dim, weight.shape[1], device=weight.device)
        out[:, :old_dim] = weight.view(count, old_dim, -1)[:, order]
        return out

    for name in ("q_norm", "k_norm"):
        weight, source = getattr(new, name).weight, getattr(old, name).weight
        weight.fill_(scale - 1)
        weight[:old_dim] = source[order] * scale - 1
    count, kv = new.sizes.heads, new.sizes.kv_heads
    q = heads(old.q_proj.weight, count)
    gate = 0.02 * torch.randn_like(q)
    new.q_proj.weight.copy_(torch.cat([q, gate], 1).flatten(0, 1))
    new.k_proj.weight.copy_(heads(old.k_proj.weight, kv).flatten(0, 1))
    v = 0.02 * torch.randn(kv, dim, new.sizes.hidden, device=q.device)
    v[:, :old_dim] = old.v_proj.weight.view(kv, old_dim, -1)
    new.v_proj.weight.copy_(v.flatten(0, 1))
    o = 0.02 * torch.randn(new.sizes.hidden, count, dim, device=q.device)
    o[..., :old_dim] = 2 * old.o_proj.weight.view(-1, count, old_dim)  # the gate begins at a half
    new.o_proj.weight.copy_(o.flatten(1))


@torch.no_grad()
def copy_layer(new: Layer, old: Layer) -> None:
    """Norms, FFN (its strongest units if the new one is smaller), attention."""
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(new, name).weight.copy_(getattr(old, name).weight - 1)
    strength = old.mlp.down_proj.weight.norm(dim=0) * old.mlp.up_proj.weight.norm(dim=1)
    kept = strength.topk(new.mlp.up_proj.weight.shape[0]).indices.sort().values
    new.mlp.gate_proj.weight.copy_(old.mlp.gate_proj.weight[kept])
    new.mlp.up_proj.weight.copy_(old.mlp.up_proj.weight[kept])
    new.mlp.down_proj.weight.copy_(old.mlp.down_proj.weight[:, kept])
    if not new.linear:
        copy_attention(new.self_attn, old.self_attn)


def student_of(teacher: Target, name: str) -> Target:
    """A hybrid that starts from the teacher."""
    changes: dict[str, Any] = HYBRIDS[name]
    sizes = replace(teacher.sizes, **changes)
    student = Target(sizes, teacher.states).to(DEVICE)
    with torch.no_grad():
        student.embedding.copy_(teacher.embedding)
        student.model["norm"].weight.copy_(teacher.model["norm"].weight - 1)
    for new, old in zip(student.model["layers"], teacher.model["layers"], strict=True):
        copy_layer(new, old)
    return student


class Trainer:
    """The student, its teacher, and the compiled pieces."""

    def __init__(self, student: Target, teacher: Target) -> None:
        self.student, self.teacher = student, teacher
        self.layers = list(student.model["layers"])
        # Layers of a kind share their code, so each kind is compiled once.
        self.mixers = [compiled(layer.mixer()) for layer in self.layers]
        self.distance = compiled(distance)

    def mix(self, number: int, x: Tensor) -> Tensor:
        return self.mixers[number](self.layers[number].input_layernorm(x))

    def layerwise(self, ids: Tensor) -> Tensor:
        """Relative squared error of each layer's mixer, on the teacher's streams."""
        with torch.no_grad():
            x = F.embedding(ids, self.teacher.embedding).to(self.dtype)
            streams, wanted = [], []
            for layer in self.teacher.model["layers"]:
                mixed = layer.mix(x)
                streams.append(x)
                wanted.append(mixed)
                x = layer.feed(x + mixed)
        losses = []
        for number, (x, want) in enumerate(zip(streams, wanted, strict=True)):
            want = want.float()
            error = (self.mix(number, x).float() - want).pow(2).mean()
            losses.append(error / want.pow(2).mean())
        return torch.stack(losses).mean()

    @property
    def dtype(self) -> torch.dtype:
        return self.teacher.embedding.dtype

    def whole(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """KL divergence to the teacher and cross entropy of the text."""
        with torch.no_grad():
            wanted = self.teacher(ids[:, :-1])[0]
        x = F.embedding(ids[:, :-1], self.student.embedding).to(self.dtype)
        for number, layer in enumerate(self.layers):
            x = layer.feed(x + self.mix(number, x))
        x = self.student.model["norm"](x)
        logits, teacher_logits = self.student.logits(x), self.teacher.logits(wanted)
        return self.distance(logits, teacher_logits, ids[:, 1:])


def distance(logits: Tensor, teacher_logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    own = logits.float().log_softmax(-1)
    wanted = teacher_logits.float().log_softmax(-1)
    kl = (wanted.exp() * (wanted - own)).sum(-1).mean()
    return kl, -own.gather(-1, ids[..., None]).mean()


def train_target(
    trainer: Trainer,
    tokens: Tensor,
    until: float,
    layerwise: float,
    save: Any,
    limit: int,
    batch: int,
    length: int,
) -> None:
    student = trainer.student
    mixing = [p for layer in trainer.layers for p in layer.mixer().parameters()]
    known = {id(p) for p in mixing}
    others = [p for p in student.parameters() if id(p) not in known]
    first, both = adamw([(mixing, 3e-3)]), adamw([(mixing, 1.5e-3), (others, 5e-4)])
    number, saved = 0, 0.25
    for step, share in steps(until, limit):
        ids = windows(tokens, batch, length + 1)
        with autocast():
            if share < layerwise:
                loss = trainer.layerwise(ids[:, :-1])
                told = f"layerwise {loss.item():.3f}" if step % 100 == 0 else ""
            else:
                kl, text = trainer.whole(ids)
                loss = kl + 0.2 * text
                told = f"KL {kl.item():.3f}, text {text.item():.3f}" if step % 100 == 0 else ""
        if told:
            say(f"target {step}:", told)
        if share < layerwise:
            update(first, loss, schedule(step, 0.9 * share / layerwise, 30))
        else:
            update(both, loss, schedule(number, (share - layerwise) / (1 - layerwise), 30))
            number += 1
        if share > saved and not limit:
            saved += 0.25
            save()
    say("target", step + 1, "steps,", number, "of the whole")


@torch.no_grad()
def text_loss(target: Target, tokens: Tensor, length: int) -> float:
    ids = windows(tokens, 16, length + 1)
    with autocast():
        logits = target.logits(target(ids[:, :-1])[0])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=HYBRIDS)
    parser.add_argument("target", type=Path, help="the teacher")
    parser.add_argument("drafter", type=Path, help="its DFlash drafter")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target-until", type=float, required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--layerwise", type=float, default=0.2, help="share of the target's time")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rollouts", type=int, default=1536, help="texts made at once")
    parser.add_argument("--rollout-length", type=int, default=640)
    parser.add_argument("--rollouts-until", type=float)
    parser.add_argument("--held", type=int, default=32, help="texts to measure on")
    parser.add_argument("--steps", type=int, default=0, help="instead of times: for a trial")
    args = parser.parse_args()
    setup()

    draft_config = read_config(args.drafter)
    states = draft_config["dflash_config"]["target_layer_ids"]
    block = draft_config["block_size"]
    teacher = load_target(args.target, states, DEVICE).requires_grad_(False).eval()
    if DEVICE == "cuda":
        teacher.to(torch.bfloat16)
    student = student_of(teacher, args.name)
    config = config_of(student.sizes)
    target_out = args.out / f"{args.name}-hybrid"
    drafter_out = args.out / f"{args.name}-hybrid-dflash"

    def save_target() -> None:
        weights = to_bfloat16(student.state_dict(), keep=("A_log",))
        save_checkpoint(target_out, config, weights, args.target)

    trainer = Trainer(student, teacher)
    if DEVICE == "cuda":  # compile while the corpus is made
        ids = torch.randint(0, student.sizes.vocab, (args.batch, args.length + 1), device=DEVICE)
        with autocast():
            trainer.layerwise(ids[:, :-1]).backward()
            sum(trainer.whole(ids)).backward()
        student.zero_grad(set_to_none=True)
        say("compiled")
    tokens = load_tokens(args.corpus, "train")
    held_tokens = load_tokens(args.corpus, "held")
    say("corpus", len(tokens))
    save_target()
    train_target(
        trainer,
        tokens,
        args.target_until,
        args.layerwise,
        save_target,
        args.steps,
        args.batch,
        args.length,
    )
    rounded(student)
    student.requires_grad_(False).eval()
    save_target()
    losses = {
        "teacher": text_loss(teacher, held_tokens, args.length),
        "hybrid": text_loss(student, held_tokens, args.length),
    }
    say("held-out text", losses)
    del trainer, teacher
    if DEVICE == "cuda":
        torch.cuda.empty_cache()

    until = args.rollouts_until or args.target_until + 0.25 * (args.until - args.target_until)
    prompts = [64, 128, 32, 192, 96, 256] * 4
    prompts = [p for p in prompts if p < args.rollout_length - block]
    ids, lengths = generate(
        student,
        tokens,
        prompts[: 1 if args.steps else None],
        args.rollout_length,
        args.rollouts,
        until,
    )
    rollouts = with_features(student, *beside_corpus(ids, lengths, tokens), gigabytes=24)
    say("features", tuple(rollouts.features.shape))
    drafter = load_drafter(args.drafter, DEVICE)
    new_config = {
        **draft_config,
        "max_position_embeddings": MAX_POSITIONS,
        "num_target_layers": student.sizes.layers,
    }

    def save_drafter() -> None:
        save_dflash(drafter_out, drafter, new_config, args.target)

    train_drafter(
        drafter,
        student.embedding,
        rollouts,
        block,
        args.until,
        1e-3,
        True,
        save_drafter,
        args.steps,
        batch=min(96, args.rollouts),
    )
    rounded(drafter)
    prompt = min(128, args.rollout_length // 2)
    texts = held_out(student, held_tokens, args.held, prompt, args.rollout_length)
    measured = {
        f"{count - 1} masks": measure_dflash(student, drafter, texts, prompt, count)
        for count in (block, block // 2)
    }
    print(table(measured), flush=True)
    report = {"loss on held-out text": losses, "acceptance length, greedy": measured}
    report["parameters"] = sum(p.numel() for p in student.parameters())
    (args.out / f"{args.name}-hybrid.json").write_text(json.dumps(report, indent=1))
    assert sizes_of(config) == student.sizes


if __name__ == "__main__":
    main()
