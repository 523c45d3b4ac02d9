# SPDX-License-Identifier: Apache-2.0
"""Make a conditional drafter's checkpoint from a DFlash drafter and its trained heads.

usage: python -m benchmarks.training.assemble dflash2 DRAFTER NAME-heads.safetensors OUT

Kinds: dflash2, lilicorr, dspark. The drafter's own weights stay as they are. The convolutions of
DFlash2 become the identity. DSpark's masks stand at the positions that they predict
(`sample_from_anchor` false). vLLM takes the embedding of DSpark's mask from a vocabulary, so this
drafter gets one of its own, the target's with another row: `--target` is needed.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.training.common import save_checkpoint
from benchmarks.training.heads import lilicorr_config
from benchmarks.training.nets import read_config, read_weights

KINDS = ("dflash2", "lilicorr", "dspark")
CONV = {"conv_kernel_size": 2, "conv_group_size": 32}


def identity_convolutions(layers: int, hidden: int) -> dict[str, Tensor]:
    """Of each layer: the row itself has weight 1, the one before 0, whatever the input."""
    taps, groups = CONV["conv_kernel_size"], hidden // CONV["conv_group_size"]
    base = torch.zeros(2, taps, hidden, dtype=torch.bfloat16)
    base[:, 0] = 1
    out: dict[str, Tensor] = {}
    for layer in range(layers):
        for place in ("attention_conv", "mlp_conv"):
            out[f"layers.{layer}.{place}.base_kernel"] = base.clone()
            out[f"layers.{layer}.{place}.kernel_projection.weight"] = torch.zeros(
                2 * taps * groups, hidden, dtype=torch.bfloat16
            )
    return out


def assemble(kind: str, drafter: Path, heads: Path, out: Path, target: Path | None = None) -> None:
    """Write the checkpoint folder. Raises ValueError for DSpark without a target."""
    config, weights, head = read_config(drafter), read_weights(drafter), load_file(heads)
    dflash: dict[str, Any] = config["dflash_config"]

    def take(*prefixes: str) -> dict[str, Tensor]:
        return {name: weight for name, weight in head.items() if name.startswith(prefixes)}

    if kind == "dflash2":
        chosen = take("candidate_selector.")
        chosen |= identity_convolutions(config["num_hidden_layers"], config["hidden_size"])
        rank = head["candidate_selector.predecessor_codebook"].shape[1]
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] = {**dflash, **CONV, "selector_rank": rank, "selector_top_k": 16}
    elif kind == "lilicorr":
        chosen = take("lilicorr.")
        config["architectures"] = ["LiLiCorrDraftModel"]
        own = lilicorr_config(config["hidden_size"])
        config["dflash_config"] = {**dflash, **own, "block_size": config["block_size"]}
    else:
        if target is None:
            raise ValueError("--target is needed: the drafter gets a vocabulary of its own")
        chosen = take("markov_head.", "confidence_head.")
        vocabulary = read_weights(target)["model.embed_tokens.weight"].clone()
        mask = torch.load(drafter / "mask_embedding.pt", weights_only=True)
        mask = mask["embedding"] if isinstance(mask, dict) else mask
        vocabulary[dflash["mask_token_id"]] = mask.reshape(-1).to(vocabulary.dtype)
        chosen["embed_tokens.weight"] = vocabulary
        config |= {
            "architectures": ["Qwen3DSparkModel"],
            "mask_token_id": dflash["mask_token_id"],
            "target_layer_ids": dflash["target_layer_ids"],
            "markov_rank": head["markov_head.markov_w1.weight"].shape[1],
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": False,
        }
    save_checkpoint(out, config, {**weights, **chosen}, drafter)
    if kind != "dspark" and (drafter / "mask_embedding.pt").exists():
        shutil.copy(drafter / "mask_embedding.pt", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("heads", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path)
    args = parser.parse_args()
    assemble(args.kind, args.drafter, args.heads, args.out, args.target)


if __name__ == "__main__":
    main()
