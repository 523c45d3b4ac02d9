# SPDX-License-Identifier: Apache-2.0
"""Conditional drafters made of a plain DFlash drafter: its weights, and a random head.

The backbone is that of the plain drafter, so drafts are often right. With heads of size 0 they are
exactly the plain drafter's.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.conftest import NANO, Pair
from tests.oracle.qwen3 import read_weights

MASK = "mask_embedding.pt"
FOLLOW = 12.0
"""Logits that a known pair of tokens adds."""
NEVER = 5
"""A special token, which nobody ever writes."""
LILICORR: dict[str, Any] = {
    "lilicorr_enabled": True,
    "lilicorr_hidden_size": 32,
    "lilicorr_num_layers": 1,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0,
    "lilicorr_factor_dim": 8,
    "lilicorr_vector_eps": 1e-6,
    "lilicorr_logit_scale": 6.0,
}


class Checkpoint:
    """A drafter's folder to be, with its config and weights; the plain drafter's at first."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.config: dict[str, Any] = json.loads((pair.drafter / "config.json").read_text())
        self.weights = read_weights(pair.drafter)
        self.generator = torch.Generator().manual_seed(seed)
        self.hidden: int = self.config["hidden_size"]
        self.vocab: int = self.config["vocab_size"]

    def random(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * std

    def save(self, folder: Path, *beside: str) -> Pair:
        """Write it.

        Args:
            folder: of the folder.
            beside: files that come along from the plain drafter.

        """
        drafter = folder / "drafter"
        drafter.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", *beside):
            shutil.copy(self.pair.drafter / name, drafter / name)
        (drafter / "config.json").write_text(json.dumps(self.config))
        save_file(
            {k: v.contiguous() for k, v in self.weights.items()}, drafter / "model.safetensors"
        )
        return self.pair._replace(name=folder.name, drafter=drafter)


def add_conv(checkpoint: Checkpoint, taps: int, group: int, size: float) -> None:
    """DFlash2's convolutions over the block. Of size 0 they change nothing."""
    hidden = checkpoint.hidden
    for layer in range(checkpoint.config["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            kernel = checkpoint.random(2, taps, hidden, std=size)
            kernel[:, 0] += 1.0
            prefix = f"layers.{layer}.{name}"
            checkpoint.weights[f"{prefix}.base_kernel"] = kernel
            rows = 2 * taps * (hidden // group)
            checkpoint.weights[f"{prefix}.kernel_projection.weight"] = checkpoint.random(
                rows, hidden, std=size * hidden**-0.5
            )
    checkpoint.config["dflash_config"] |= {"conv_kernel_size": taps, "conv_group_size": group}


def dflash2(
    folder: Path,
    pair: Pair = NANO,
    top_k: int = 4,
    size: float = 1.0,
    conv: float = 0.02,
    rank: int = 8,
    seed: int = 0,
    **dflash: Any,
) -> Pair:
    """A DFlash2 drafter.

    Args:
        folder: where it goes.
        pair: whose plain drafter it is made of.
        top_k: candidates a position.
        size: typical score of an edge; 0: the selector does nothing.
        conv: size of the convolutions' deviation from doing nothing.
        rank: of the selector.
        seed: of the random weights.
        dflash: more keys of `dflash_config`.

    """
    made = Checkpoint(pair, seed)
    made.config["architectures"] = ["DFlash2DraftModel"]
    add_conv(made, 2, 16, conv)
    made.config["dflash_config"] |= {"selector_rank": rank, "selector_top_k": top_k, **dflash}
    made.weights["candidate_selector.predecessor_codebook"] = made.random(made.vocab, rank)
    made.weights["candidate_selector.successor_codebook"] = made.random(
        made.vocab, rank, std=size * rank**-0.5
    )
    made.weights["candidate_selector.hidden_projection.weight"] = made.random(
        rank, made.hidden, std=made.hidden**-0.5
    )
    return made.save(folder, MASK)


def dspark(
    folder: Path,
    pair: Pair = NANO,
    size: float = 1.0,
    conv: float = 0.0,
    rank: int = 8,
    confidence: bool | None = None,
    from_anchor: bool = False,
    vocabulary: int | None = None,
    follow: Sequence[Sequence[int]] = (),
    seed: int = 0,
) -> Pair:
    """A DSpark drafter in the layout of DeepSeek's checkpoints.

    Args:
        folder: where it goes.
        pair: whose plain drafter it is made of.
        size: typical score of an edge; 0: the Markov head does nothing.
        conv: it has none; for calls that fit other families.
        rank: of the Markov head.
        confidence: None: no confidence head, else whether it reads the token before.
        from_anchor: whether the anchor's row drafts the first token. The plain drafter was not
            trained so: what it drafts is then one place late, and seldom right without `follow`.
        vocabulary: tokens of a draft vocabulary, the target's first ones but `NEVER`; None: all.
        follow: texts whose pairs of tokens the Markov head knows, instead of random ones.
        seed: of the random weights.

    """
    assert not conv
    known = sorted({token for text in follow for token in text[:-1]})
    rank = max(rank, len(known))
    made = Checkpoint(pair, seed)
    dflash = made.config.pop("dflash_config")
    made.config |= {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": dflash["target_layer_ids"],
        "mask_token_id": dflash["mask_token_id"],
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "sample_from_anchor": from_anchor,
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": bool(confidence),
        "tie_word_embeddings": False,
    }
    # vLLM reads no mask_embedding.pt for DSpark.
    target = read_weights(pair.target)["model.embed_tokens.weight"]
    embeddings, mask = target.clone(), torch.load(pair.drafter / MASK)
    embeddings[dflash["mask_token_id"]] = (
        mask["embedding"] if isinstance(mask, dict) else mask
    ).reshape(-1)
    made.weights["embed_tokens.weight"] = embeddings
    output = vocabulary or made.vocab
    if vocabulary is not None:
        made.config["draft_vocab_size"] = vocabulary
        kept = torch.arange(vocabulary)
        kept[NEVER:] += 1
        made.weights["lm_head.weight"] = target[kept]
        made.weights["d2t"] = kept - torch.arange(vocabulary)
    made.weights["markov_head.markov_w1.weight"] = made.random(made.vocab, rank)
    made.weights["markov_head.markov_w2.weight"] = made.random(output, rank, std=size * rank**-0.5)
    if follow:
        before, after = torch.zeros(made.vocab, rank), torch.zeros(output, rank)
        for place, token in enumerate(known):
            before[token, place] = 1.0
        for text in follow:
            for token, other in itertools.pairwise(text):
                after[other, known.index(token)] = FOLLOW
        made.weights["markov_head.markov_w1.weight"] = before
        made.weights["markov_head.markov_w2.weight"] = after
    if confidence is not None:
        width = made.hidden + (rank if confidence else 0)
        made.weights["confidence_head.proj.weight"] = made.random(1, width, std=width**-0.5)
        made.weights["confidence_head.proj.bias"] = made.random(1)
    return made.save(folder)


def lilicorr(
    folder: Path,
    pair: Pair = NANO,
    top_k: int = 4,
    size: float = 6.0,
    conv: float = 0.02,
    seed: int = 0,
) -> Pair:
    """A LiLiCorr drafter.

    Args:
        folder: where it goes.
        pair: whose plain drafter it is made of.
        top_k: candidates a position.
        size: scale of the scores, which are cosines.
        conv: size of the convolutions' deviation from doing nothing; 0: there are none.
        seed: of the random weights.

    """
    made = Checkpoint(pair, seed)
    made.config["architectures"] = ["LiLiCorrDraftModel"]
    if conv:
        add_conv(made, 2, 16, conv)
    keys = {**LILICORR, "lilicorr_candidate_topk": top_k, "lilicorr_logit_scale": size}
    made.config["dflash_config"] |= keys
    hidden, width = made.hidden, LILICORR["lilicorr_hidden_size"]
    block, heads = made.config["block_size"], LILICORR["lilicorr_num_heads"]
    factor, ratio = LILICORR["lilicorr_factor_dim"], LILICORR["lilicorr_mlp_ratio"]
    linear: dict[str, tuple[int, int]] = {
        "token_proj": (width, hidden),
        "pass_hidden_proj": (width, hidden),
        "context_proj": (width, hidden),
        "feature_mlp.up_proj": (width, 5),
        "feature_mlp.down_proj": (width, width),
        "factor_input_proj": (width, 3 * width),
        "out_head": (factor, width),
        "in_head": (factor, width),
        "anchor_out_head": (factor, width),
    }
    norms = ["output_norm", "anchor_norm"]
    for layer in range(LILICORR["lilicorr_num_layers"]):
        inner = int(width * ratio)
        linear |= {
            f"layers.{layer}.attn.out_proj": (width, width),
            f"layers.{layer}.mlp.up_proj": (inner, width),
            f"layers.{layer}.mlp.down_proj": (width, inner),
        }
        norms += [f"layers.{layer}.attn_norm", f"layers.{layer}.mlp_norm"]
        made.weights[f"lilicorr.layers.{layer}.attn.in_proj_weight"] = made.random(
            3 * width, width, std=width**-0.5
        )
        made.weights[f"lilicorr.layers.{layer}.attn.in_proj_bias"] = made.random(3 * width, std=0.1)
    for name, (rows, columns) in linear.items():
        made.weights[f"lilicorr.{name}.weight"] = made.random(rows, columns, std=columns**-0.5)
        made.weights[f"lilicorr.{name}.bias"] = made.random(rows, std=0.1)
    for name in norms:
        made.weights[f"lilicorr.{name}.weight"] = 1 + made.random(width, std=0.1)
    made.weights |= {
        "lilicorr.feature_norm.weight": 1 + made.random(5, std=0.1),
        "lilicorr.feature_norm.bias": made.random(5, std=0.1),
        "lilicorr.slot_embedding": made.random(1, 1, block - 1, 1, width, std=0.3),
        "lilicorr.rank_embedding": made.random(1, 1, 1, top_k, width, std=0.3),
        "lilicorr.relative_slot_bias": made.random(heads, 2 * block - 1, std=0.3),
        "lilicorr.same_slot_bias": made.random(heads, std=0.3),
    }
    return made.save(folder, MASK)
