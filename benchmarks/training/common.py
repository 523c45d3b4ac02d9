# SPDX-License-Identifier: Apache-2.0
"""What the training scripts share: time, batches, rollouts, the loss of a block drafter, files."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.training.nets import Drafter, Target

SHARD_BYTES = 14_000_000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STORED = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # features
START = time.time()


def setup(seed: int = 0) -> None:
    """Call first. Anything that cannot be compiled runs as it is."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(seed)
    torch._dynamo.config.suppress_errors = True
    if DEVICE == "cpu":
        torch.set_num_threads(1)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False) if DEVICE == "cuda" else function


def say(*words: object) -> None:
    print(f"[{time.time() - START:5.0f} s]", *words, flush=True)


def autocast() -> torch.autocast:
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


def steps(until: float, limit: int = 0) -> Iterator[tuple[int, float]]:
    """(step, share of the time gone) until the clock says `until`, or for `limit` steps."""
    begin, number = time.time(), 0
    while True:
        share = (time.time() - begin) / max(until - begin, 1e-3)
        if limit:
            share = number / limit
        if share >= 1:
            return
        yield number, share
        number += 1


def adamw(groups: Iterable[tuple[Iterable[nn.Parameter], float]]) -> torch.optim.AdamW:
    """AdamW over (parameters, learning rate); vectors do not decay."""
    options = []
    for parameters, rate in groups:
        parameters = list(parameters)
        for decay, chosen in (
            (0.1, [p for p in parameters if p.dim() > 1]),
            (0.0, [p for p in parameters if p.dim() < 2]),
        ):
            if chosen:
                options.append({"params": chosen, "lr": rate, "weight_decay": decay, "peak": rate})
    return torch.optim.AdamW(options, betas=(0.9, 0.95), fused=DEVICE == "cuda")


def update(optimizer: torch.optim.AdamW, loss: Tensor, rate: float) -> None:
    """One step at `rate` of each group's peak learning rate. Steps that overflow are left out."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * rate
    # No branch on the device's value: a gradient that is not finite becomes zero.
    for p in parameters:
        if p.grad is not None:
            p.grad = torch.where(norm.isfinite(), p.grad, torch.zeros_like(p.grad))
    optimizer.step()


def schedule(step: int, share: float, warmup: int = 100) -> float:
    """Linear warm-up, then linear decay."""
    return min(1.0, (step + 1) / warmup) * (1 - share)


def wait_for(file: Path) -> Path:
    """A file that another process makes; it appears at once and whole."""
    while not file.exists():
        time.sleep(0.2)
    return file


def load_tokens(file: Path, part: str) -> Tensor:
    return torch.from_numpy(np.load(wait_for(file))[part].astype(np.int32)).to(DEVICE)


def windows(tokens: Tensor, count: int, length: int) -> Tensor:
    """[count, length] random windows."""
    begin = torch.randint(0, len(tokens) - length, (count,), device=tokens.device)
    return tokens[begin[:, None] + torch.arange(length, device=tokens.device)].long()


@dataclass
class Rollouts:
    """Texts that a target wrote.

    Attributes:
        ids: int32 [N, L].
        prompts: int64 [N], lengths of their prompts.
        features: [N, L, S * H], what the drafter reads.
    """

    ids: Tensor
    prompts: Tensor
    features: Tensor

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def sample(self, count: int, anchors: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [count], ids [count, L], and anchors [count, anchors] behind the prompts."""
        rows = torch.randint(0, len(self.ids), (count,), device=self.ids.device)
        low = (self.prompts[rows] - 1)[:, None]
        room = self.length - block - low
        picked = torch.rand(count, anchors, device=self.ids.device) * room
        return rows, self.ids[rows].long(), low + picked.long()


@torch.no_grad()
def generate(
    target: Target, tokens: Tensor, prompts: list[int], length: int, batch: int, until: float
) -> tuple[Tensor, Tensor]:
    """Rollouts, half of them greedy: ids [N, length] and prompt lengths, until the time is up."""
    ids, lengths = [], []
    for prompt in prompts:
        begin = time.time()
        warm = torch.rand(batch, device=tokens.device) < 0.5
        temperature = torch.where(warm, 0.4 + 0.6 * torch.rand(batch, device=tokens.device), 0.0)
        with autocast():
            texts = target.generate(windows(tokens, batch, prompt), length - prompt, temperature)
        ids.append(texts.to(torch.int32))
        lengths.append(torch.full((batch,), prompt, device=tokens.device))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        took = time.time() - begin
        say(f"rollouts: {batch} of {length - prompt} tokens in {took:.0f} s")
        if time.time() + 0.7 * took > until:
            break
    return torch.cat(ids), torch.cat(lengths)


def beside_corpus(
    ids: Tensor, lengths: Tensor, tokens: Tensor, times: int = 4
) -> tuple[Tensor, Tensor]:
    """Rollouts and `times` as many pieces of the corpus.

    A drafter soon knows a few thousand rollouts by heart. The corpus costs nothing, and keeps it
    from that.
    """
    more = windows(tokens, times * len(ids), ids.shape[1])
    prompts = torch.full((len(more),), 17, device=lengths.device)
    return torch.cat([ids, more.to(ids.dtype)]), torch.cat([lengths, prompts])


@torch.no_grad()
def held_out(target: Target, tokens: Tensor, count: int, prompt: int, length: int) -> Tensor:
    """Greedy texts [count, length] from prompts of files that were not trained on."""
    with autocast():
        cold = torch.zeros(count, device=tokens.device)
        return target.generate(windows(tokens, count, prompt), length - prompt, cold).int()


@torch.no_grad()
def with_features(
    target: Target, ids: Tensor, prompts: Tensor, gigabytes: float = 14, batch: int = 64
) -> Rollouts:
    """Rollouts with their features: a random choice if all would take more memory."""
    row = len(target.states) * target.sizes.hidden * STORED.itemsize * ids.shape[1]
    most = max(1, int(gigabytes * 1e9 / row))
    if len(ids) > most:
        chosen = torch.randperm(len(ids), device=ids.device)[:most]
        ids, prompts = ids[chosen], prompts[chosen]
    width = len(target.states) * target.sizes.hidden
    features = torch.empty(*ids.shape, width, dtype=STORED, device=ids.device)
    for part, out in zip(ids.split(batch), features.split(batch), strict=True):
        with autocast():
            out.copy_(target(part.long())[1])
    return Rollouts(ids, prompts, features)


def labels_of(ids: Tensor, anchors: Tensor, count: int) -> Tensor:
    """The `count` tokens behind each anchor, [B, A, count]."""
    offsets = torch.arange(1, count + 1, device=ids.device)
    places = (anchors[:, :, None] + offsets).flatten(1)
    return ids.gather(1, places).view(*anchors.shape, count)


def position_weights(count: int, device: torch.device | str) -> Tensor:
    """Early positions matter more: a later one counts only if those before it were right."""
    return torch.exp(-torch.arange(count, device=device) / (0.45 * (count + 1)))


def train_drafter(
    drafter: Drafter,
    embedding: Tensor,
    rollouts: Rollouts,
    block: int,
    until: float,
    rate: float,
    narrow: bool,
    save: Callable[[], None],
    limit: int = 0,
    batch: int = 96,
    anchors: int = 16,
) -> None:
    """Train a DFlash drafter on rollouts.

    Args:
        drafter: changed in place.
        embedding: the target's, [V, H]; also its head.
        rollouts: of the target.
        block: anchor and masks.
        until: time of the end.
        rate: peak learning rate.
        narrow: every fourth step uses half or three quarters of the block, so that the drafter
            also works with fewer masks.
        save: called every 90 seconds and at the end.
        limit: steps instead of time.
        batch: texts a step.
        anchors: blocks a text.

    """
    optimizer = adamw([(drafter.parameters(), rate)])
    forward = compiled(drafter)
    used = torch.tensor(block, device=DEVICE)
    weights = position_weights(block - 1, DEVICE)
    places = torch.arange(1, block, device=DEVICE)
    saved = time.time()
    for step, share in steps(until, limit):
        rows, ids, places_of = rollouts.sample(batch, anchors, block)
        features = rollouts.features[rows]
        part = (block // 2, block * 3 // 4)[step // 4 % 2]
        used.fill_(part if narrow and step % 4 == 0 else block)
        labels = labels_of(ids, places_of, block - 1)
        embeds = F.embedding(ids.gather(1, places_of), embedding)
        weight = weights * (places < used)
        with autocast():
            hidden = forward(features, embeds, places_of, block, used)[:, :, 1:]
            logits = F.linear(hidden, embedding.to(hidden.dtype)).flatten(0, 2).float()
            losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
            loss = (losses * (weight / weight.sum())).sum(-1).mean()
        update(optimizer, loss, schedule(step, share))
        if step % 200 == 0:
            say(f"drafter {step}: loss {loss.item():.3f}, first {losses[..., 0].mean().item():.3f}")
        if time.time() - saved > 90:
            saved = time.time()
            save()
    say("drafter", step + 1, "steps")
    save()


def to_bfloat16(state: dict[str, Tensor], keep: tuple[str, ...] = ()) -> dict[str, Tensor]:
    return {
        name: weight.detach().to("cpu", torch.float32 if name.endswith(keep) else torch.bfloat16)
        for name, weight in state.items()
        if isinstance(weight, Tensor)
    }


def save_checkpoint(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], tokenizer_from: Path
) -> None:
    """A folder that vLLM loads, in shards of at most 14 MB. It appears whole."""
    waiting = folder.with_name(f".{folder.name}")
    shutil.rmtree(waiting, ignore_errors=True)
    waiting.mkdir(parents=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, weight in weights.items():
        if size + weight.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = weight.contiguous().clone()
        size += weight.nbytes
    if len(shards) == 1:
        save_file(shards[0], waiting / "model.safetensors", {"format": "pt"})
    else:
        places = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, waiting / file, {"format": "pt"})
            places |= dict.fromkeys(shard, file)
        total = sum(weight.nbytes for weight in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (waiting / "model.safetensors.index.json").write_text(json.dumps(index))
    (waiting / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (tokenizer_from / name).exists():
            shutil.copy(tokenizer_from / name, waiting / name)
    shutil.rmtree(folder, ignore_errors=True)
    waiting.rename(folder)


def save_dflash(folder: Path, drafter: Drafter, config: dict[str, Any], origin: Path) -> None:
    """A DFlash checkpoint with its mask embedding."""
    weights = to_bfloat16(drafter.state_dict())
    mask = weights.pop("mask_embedding")
    save_checkpoint(folder, config, weights, origin)
    mask_id = config["dflash_config"]["mask_token_id"]
    torch.save({"embedding": mask, "mask_token_id": mask_id}, folder / "mask_embedding.pt")


def rounded(module: nn.Module) -> None:
    """Weights as a bfloat16 checkpoint holds them, still in float32."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if not name.endswith("A_log"):
                weight.copy_(weight.to(torch.bfloat16))
