# SPDX-License-Identifier: Apache-2.0
"""Wide conditional heads that do what narrow ones do: DFlash2, LiLiCorr, DSpark.

What they read of the hidden states is read from the carriers; their inner sizes stay. Tokens that
inflation adds never become candidates, so their rows are random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.widener import CONSTANT, Widener

HEADS = ("candidate_selector.", "lilicorr.", "markov_head.", "confidence_head.", "embed_tokens.")
READERS = (
    "candidate_selector.hidden_projection.weight",
    "lilicorr.token_proj.weight",
    "lilicorr.pass_hidden_proj.weight",
    "lilicorr.context_proj.weight",
)
TABLES = ("codebook", "markov_w1.weight", "markov_w2.weight")


def wide_heads(w: Widener, weights: dict[str, Tensor], vocab: int) -> dict[str, Tensor]:
    """The heads of a drafter, and its own vocabulary if it has one."""
    out: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.startswith(HEADS):
            continue
        if name in READERS:
            out[name] = w.reads(weight)
        elif name == "confidence_head.proj.weight":
            hidden, rest = weight[:, : w.narrow], weight[:, w.narrow :]
            wide = torch.zeros(1, w.wide, device=w.device)
            for copy in range(w.carriers):
                wide[:, w.index[copy]] = hidden.to(w.device, torch.float32) / w.carriers
            out[name] = torch.cat([wide, rest.to(wide)], 1)
        elif name.startswith("embed_tokens."):
            added = w.random(vocab - len(weight), w.wide, float(weight.std()))
            out[name] = torch.cat([w.writes(weight.T).T, added])
            if w.constant:
                out[name][:, -1] = CONSTANT
        elif name.endswith(TABLES):
            added = w.random(vocab - len(weight), weight.shape[1], float(weight.float().std()))
            out[name] = torch.cat([weight.to(w.device, w.dtype), added])
        else:
            keep = name.startswith("confidence_head.")
            out[name] = weight.to(w.device, torch.float32 if keep else w.dtype)
    return out


def check_convolutions(w: Widener, dflash: dict[str, Any]) -> None:
    """Raises ValueError if DFlash2's channel groups do not fit."""
    if w.wide % wide_group(w, dflash):
        raise ValueError(
            f"hidden size {w.wide} must be a multiple of {wide_group(w, dflash)}, the channels of "
            "a convolution's group"
        )


def wide_group(w: Widener, dflash: dict[str, Any]) -> int:
    """Channels that share their coefficients: copies stand side by side, two of each channel."""
    return dflash["conv_group_size"] * min(2, w.copies)


def wide_convolutions(
    w: Widener, weights: dict[str, Tensor], prefix: str | None, dflash: dict[str, Any]
) -> dict[str, Tensor]:
    """DFlash2's `attention_conv` and `mlp_conv` of one layer; `prefix` None: of one that adds
    nothing, where they pass on what comes."""
    taps, old_size = dflash["conv_kernel_size"], dflash["conv_group_size"]
    old_groups, groups = w.narrow // old_size, w.wide // wide_group(w, dflash)
    used = w.copies * w.narrow // wide_group(w, dflash)
    out: dict[str, Tensor] = {}
    for place in ("attention_conv", "mlp_conv"):
        base = torch.zeros(2, taps, w.wide, dtype=w.dtype, device=w.device)
        base[:, 0] = 1
        rows = torch.zeros(2 * taps, groups, w.wide, dtype=w.dtype, device=w.device)
        if prefix is not None:
            old = weights[f"{prefix}{place}.base_kernel"].to(w.device, w.dtype)
            for copy in range(w.copies):
                base[..., w.index[copy]] = old
            old = weights[f"{prefix}{place}.kernel_projection.weight"]
            own = w.reads(old).view(2 * taps, old_groups, w.wide)
            for group in range(used):
                rows[:, group] = own[:, group % old_groups]
        out[f"{place}.base_kernel"] = base
        out[f"{place}.kernel_projection.weight"] = rows.flatten(0, 1)
    return out
