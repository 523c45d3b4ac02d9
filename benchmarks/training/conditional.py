# SPDX-License-Identifier: Apache-2.0
"""Train conditional heads on a frozen DFlash drafter: selector, LiLiCorr, Markov head.

usage: python -m benchmarks.training.conditional NAME TARGET DRAFTER ROLLOUTS.npz OUT --until TIME

Writes OUT/NAME-heads.safetensors, which benchmarks.training.assemble makes checkpoints of, and
OUT/NAME-heads.json. The Markov head is trained for the layout in which masks stand at the positions
that they predict (`sample_from_anchor` false).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.training.common import (
    DEVICE,
    adamw,
    autocast,
    compiled,
    labels_of,
    position_weights,
    rounded,
    say,
    schedule,
    steps,
    to_bfloat16,
    update,
)
from benchmarks.training.heads import LiLiCorr, Markov, Selector, lilicorr_config
from benchmarks.training.measure import (
    TOP_K,
    candidates,
    draft_positions,
    lattice_of,
    measure,
)
from benchmarks.training.nets import Drafter, Target
from benchmarks.training.oracle import table
from benchmarks.training.task import RANKS, add_arguments, load


class Heads(nn.Module):
    """One of each."""

    def __init__(self, drafter: Drafter, block: int, rank: int) -> None:
        super().__init__()
        s = drafter.sizes
        self.selector = Selector(s.hidden, s.vocab, rank)
        self.markov = Markov(s.hidden, s.vocab, rank)
        self.lilicorr = LiLiCorr(s.hidden, block, s.eps, lilicorr_config(s.hidden))

    def losses(
        self, hidden: Tensor, context: Tensor, embedding: Tensor, before: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Losses of each position [N, D] for selector, LiLiCorr and Markov head; and of the
        Markov head's confidence.

        Args:
            hidden: [N, D, H], the drafter's.
            context: [N, H], the drafter's context before the anchor.
            embedding: the target's [V, H].
            before: int64 [N, D], the tokens before.
            labels: int64 [N, D], the text.

        """
        logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
        values, ids = logits.topk(TOP_K, -1)
        place = ids == labels[..., None]
        there, index = place.any(-1), place.float().argmax(-1)

        def choice(scores: Tensor, valid: Tensor) -> Tensor:
            loss = F.cross_entropy(scores.float().flatten(0, 1), index.flatten(), reduction="none")
            return loss.view_as(labels) * valid

        selected = choice(self.selector.after(hidden, before, ids, values), there)
        log_probs = values - logits.logsumexp(-1, keepdim=True)
        scores = self.lilicorr(F.embedding(ids, embedding), log_probs, hidden, context)
        row = F.pad(index[:, :-1], (1, 0))
        scores = scores.gather(2, row[..., None, None].expand(-1, -1, 1, TOP_K))[:, :, 0]
        linked = choice(scores, there & F.pad(there[:, :-1], (1, 0), value=True))
        full = logits + self.markov.bias(before).float()
        after = F.cross_entropy(full.flatten(0, 1), labels.flatten(), reduction="none")
        right = (full.argmax(-1) == labels).float()
        sure = self.markov.confidence(hidden.detach(), before).float()
        confidence = F.binary_cross_entropy_with_logits(sure, right, reduction="none")
        return selected, linked, after.view_as(labels), confidence

    def checkpoint(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {
            f"candidate_selector.{n}": p for n, p in self.selector.named_parameters()
        }
        named |= {f"lilicorr.{n}": p for n, p in self.lilicorr.named_parameters()}
        named |= self.markov.checkpoint()
        keep = ("confidence_head.proj.weight", "confidence_head.proj.bias")
        return {n: p.contiguous() for n, p in to_bfloat16(named, keep=keep).items()}


def markov_lattice(
    markov: Markov, embedding: Tensor, hidden: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids [N, D, K] and lattice [N, D, K, K] of a DSpark draft. hidden [N, D, H], anchors [N]."""
    with autocast():
        logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    logits[:, 0] += markov.bias(anchors).float()
    best = logits.log_softmax(-1).topk(TOP_K, -1)
    values = logits.gather(-1, best.indices)
    scores = markov(best.indices, values, anchors)
    scores[:, 0] = values[:, 0, None]  # its bias is in already
    return best.indices, lattice_of(scores, best.values)


@torch.no_grad()
def acceptances(
    heads: Heads, target: Target, drafter: Drafter, texts: Tensor, prompt: int, block: int
) -> dict[str, dict[str, float]]:
    """Acceptance of the unary tree and of each head's lattice."""
    hidden, context = draft_positions(target, drafter, texts, prompt - 1, block)
    count = hidden.shape[1]
    lattices: dict[str, list[Tensor]] = {"selector": [], "LiLiCorr": [], "Markov": []}
    all_ids, all_values, markov_ids = [], [], []
    for rows, own, text in zip(hidden, context, texts.long(), strict=True):
        anchors = text[prompt - 1 : prompt - 1 + count]
        ids, log_probs = candidates(target.embedding, rows)
        all_ids.append(ids)
        all_values.append(log_probs)
        scores = heads.selector(rows, ids, log_probs, anchors)
        lattices["selector"].append(lattice_of(scores, log_probs))
        before = own[prompt - 2 : prompt - 2 + count]
        scores = heads.lilicorr(F.embedding(ids, target.embedding), log_probs, rows, before)
        lattices["LiLiCorr"].append(lattice_of(scores, log_probs))
        ids, lattice = markov_lattice(heads.markov, target.embedding, rows, anchors)
        markov_ids.append(ids)
        lattices["Markov"].append(lattice)
    ids = torch.stack(all_ids)
    out = {"unary": measure(texts, prompt, ids, torch.stack(all_values), unary=True)}
    for name, parts in lattices.items():
        own_ids = torch.stack(markov_ids) if name == "Markov" else ids
        out[name] = measure(texts, prompt, own_ids, torch.stack(parts), unary=False)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, batch=48, anchors=8)
    args = parser.parse_args()
    _, block, target, drafter, rollouts, held, prompt = load(args, seed=2)
    drafter.requires_grad_(False).eval()
    heads = Heads(drafter, block, RANKS[args.name]).to(DEVICE)
    optimizer = adamw(
        [
            (heads.selector.parameters(), 2e-3),
            (heads.markov.parameters(), 2e-3),
            (heads.lilicorr.parameters(), 1.5e-3),
        ]
    )
    forward, losses_of = compiled(drafter), compiled(heads.losses)
    weights = position_weights(block - 1, DEVICE)
    weights = weights / weights.sum()
    shape: Any = (args.batch * args.anchors, block - 1)
    for step, share in steps(args.until, args.steps):
        rows, ids, anchors = rollouts.sample(args.batch, args.anchors, block)
        features = rollouts.features[rows]
        labels = labels_of(ids, anchors, block - 1).view(shape)
        first = ids.gather(1, anchors)
        before = torch.cat([first.view(-1, 1), labels[:, :-1]], 1)
        with autocast():
            with torch.no_grad():
                embeds = F.embedding(first, target.embedding)
                hidden = forward(features, embeds, anchors, block)[:, :, 1:].reshape(*shape, -1)
                places = (anchors - 1)[..., None].expand(-1, -1, features.shape[-1])
                context = drafter.context(features.gather(1, places)).flatten(0, 1)
            losses = losses_of(hidden, context, target.embedding, before, labels)
            means = [(loss * weights).sum(-1).mean() for loss in losses]
            loss = torch.stack(means).sum()
        update(optimizer, loss, schedule(step, share))
        if step % 200 == 0:
            say(f"heads {step}:", [round(mean.item(), 3) for mean in means])
    say("heads", step + 1, "steps")
    rounded(heads)
    save_file(heads.checkpoint(), args.out / f"{args.name}-heads.safetensors", {"format": "pt"})
    measured = acceptances(heads, target, drafter, held, prompt, block)
    print(table(measured), flush=True)
    (args.out / f"{args.name}-heads.json").write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
