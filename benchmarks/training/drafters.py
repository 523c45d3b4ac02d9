# SPDX-License-Identifier: Apache-2.0
"""Train other drafters of a target, from a DFlash drafter that it has.

usage: python -m benchmarks.training.drafters wide NAME TARGET DRAFTER ROLLOUTS.npz OUT --until TIME
       python -m benchmarks.training.drafters dspark ...

wide: a DFlash drafter whose attention starts anew and sees full blocks only. It drafts badly with
    fewer masks. Writes OUT/NAME-dflash-wide.
dspark: the anchor's row predicts the first token and a Markov head corrects the others. Writes
    OUT/NAME-dspark. vLLM takes the mask's embedding from the vocabulary, so this one does, too.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from benchmarks.training.common import (
    DEVICE,
    Rollouts,
    adamw,
    autocast,
    compiled,
    labels_of,
    position_weights,
    rounded,
    save_checkpoint,
    save_dflash,
    say,
    schedule,
    steps,
    to_bfloat16,
    train_drafter,
    update,
)
from benchmarks.training.conditional import markov_lattice
from benchmarks.training.heads import Markov
from benchmarks.training.measure import candidates, draft_positions, measure, measure_dflash
from benchmarks.training.nets import Drafter, Target, initialise
from benchmarks.training.oracle import table
from benchmarks.training.task import RANKS, add_arguments, load


def forget_attention(drafter: Drafter) -> None:
    for layer in drafter.layers:
        initialise(layer.self_attn)
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            nn.init.ones_(norm.weight)
    # initialise() knows names from the layer on
    for layer in drafter.layers:
        nn.init.normal_(layer.self_attn.o_proj.weight, std=0.3 * drafter.sizes.hidden**-0.5)
    nn.init.normal_(drafter.mask_embedding, std=0.02)


def dspark_config(config: dict[str, Any], block: int, rank: int) -> dict[str, Any]:
    """config.json of a DSpark drafter with `block` rows, from that of a DFlash drafter."""
    dflash = config["dflash_config"]
    out = {name: value for name, value in config.items() if name != "dflash_config"}
    return {
        **out,
        "architectures": ["Qwen3DSparkModel"],
        "block_size": block,
        "mask_token_id": dflash["mask_token_id"],
        "target_layer_ids": dflash["target_layer_ids"],
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "dflash_config": dflash,
    }


def train_dspark(
    drafter: Drafter,
    markov: Markov,
    embedding: Tensor,
    rollouts: Rollouts,
    block: int,
    until: float,
    limit: int,
    batch: int,
    anchors: int,
) -> None:
    drafter.mask_embedding.requires_grad_(False)
    own = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = adamw([(own, 8e-4), (markov.parameters(), 2e-3)])
    forward = compiled(drafter)

    def losses_of(hidden: Tensor, before: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
        logits = logits + markov.bias(before).float()
        loss = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
        right = (logits.argmax(-1) == labels).float()
        sure = markov.confidence(hidden, before).float()
        sure = F.binary_cross_entropy_with_logits(sure, right, reduction="none")
        return loss.view_as(labels), sure

    losses_of = compiled(losses_of)
    weights = position_weights(block, DEVICE)
    weights = weights / weights.sum()
    for step, share in steps(until, limit):
        rows, ids, places = rollouts.sample(batch, anchors, block + 1)
        labels = labels_of(ids, places, block)
        first = ids.gather(1, places)
        before = torch.cat([first[..., None], labels[..., :-1]], -1)
        with autocast():
            embeds = F.embedding(first, embedding)
            hidden = forward(rollouts.features[rows], embeds, places, block)
            losses, sure = losses_of(hidden, before, labels)
            loss = ((losses + 0.1 * sure) * weights).sum(-1).mean()
        update(optimizer, loss, schedule(step, share))
        if step % 200 == 0:
            say(f"dspark {step}: loss {loss.item():.3f}, first {losses[..., 0].mean().item():.3f}")
    say("dspark", step + 1, "steps")


@torch.no_grad()
def measure_dspark(
    target: Target, drafter: Drafter, markov: Markov, texts: Tensor, prompt: int, block: int
) -> dict[str, dict[str, float]]:
    hidden, _ = draft_positions(target, drafter, texts, prompt - 1, block, skip=0)
    base_ids, base, ids, lattices = [], [], [], []
    for rows, text in zip(hidden, texts.long(), strict=True):
        anchors = text[prompt - 1 : prompt - 1 + len(rows)]
        own, values = candidates(target.embedding, rows)
        base_ids.append(own)
        base.append(values)
        own, lattice = markov_lattice(markov, target.embedding, rows, anchors)
        ids.append(own)
        lattices.append(lattice)
    return {
        "base logits": measure(texts, prompt, torch.stack(base_ids), torch.stack(base), unary=True),
        "Markov": measure(texts, prompt, torch.stack(ids), torch.stack(lattices), unary=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["wide", "dspark"])
    add_arguments(parser, batch=96, anchors=16)
    args = parser.parse_args()
    config, block, target, drafter, rollouts, held, prompt = load(args, seed=3)
    if args.kind == "wide":
        forget_attention(drafter)
        out = args.out / f"{args.name}-dflash-wide"
        train_drafter(
            drafter,
            target.embedding,
            rollouts,
            block,
            args.until,
            1.5e-3,
            False,
            lambda: save_dflash(out, drafter, config, args.target),
            args.steps,
            args.batch,
            args.anchors,
        )
        rounded(drafter)
        measured = {
            f"{count - 1} masks": measure_dflash(target, drafter, held, prompt, count)
            for count in (block, block * 3 // 4, block // 2)
        }
    else:
        out = args.out / f"{args.name}-dspark"
        rank = RANKS[args.name]
        markov = Markov(drafter.sizes.hidden, drafter.sizes.vocab, rank).to(DEVICE)
        with torch.no_grad():
            drafter.mask_embedding.copy_(target.embedding[config["dflash_config"]["mask_token_id"]])
        train_dspark(
            drafter,
            markov,
            target.embedding,
            rollouts,
            block - 1,
            args.until,
            args.steps,
            args.batch,
            args.anchors,
        )
        rounded(drafter)
        rounded(markov)
        keep = ("confidence_head.proj.weight", "confidence_head.proj.bias")
        weights = to_bfloat16({**drafter.state_dict(), **markov.checkpoint()}, keep=keep)
        del weights["mask_embedding"]
        save_checkpoint(out, dspark_config(config, block - 1, rank), weights, args.target)
        measured = measure_dspark(target, drafter, markov, held, prompt, block - 1)
    print(table(measured), flush=True)
    out.with_suffix(".json").write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
