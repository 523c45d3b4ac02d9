# SPDX-License-Identifier: Apache-2.0
"""A DFlash drafter in plain PyTorch (vLLM: `models/qwen3_dflash.py`, `spec_decode/dflash/`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from .qwen3 import KeyValue, Layer, LayerShape, Target, read_weights, rms_norm


class Drafter:
    """A DFlashDraftModel checkpoint in float32 on the CPU, bound to its target.

    Embedding and head are the target's unless the checkpoint ships its own.
    """

    first_row = 1
    """Row of the block that drafts the first token: the first mask."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        mask_embedding: Tensor | None,
        target: Target,
    ) -> None:
        """mask_embedding float32 [hidden] stands in for the mask token's row, as vLLM does."""
        if config.get("is_causal") or config["dflash_config"].get("causal"):
            raise NotImplementedError("causal DFlash drafters")
        weights = dict(weights)
        self.shape = LayerShape.from_config(config)
        self.block_size: int = config["block_size"]
        self.mask_token_id: int = config["dflash_config"]["mask_token_id"]
        # Layer id i of the config means what leaves layer i, that is what enters layer i + 1.
        self.state_ids = [i + 1 for i in config["dflash_config"]["target_layer_ids"]]
        self.embed_tokens = weights.pop("embed_tokens.weight", target.embed_tokens)
        if mask_embedding is not None:
            self.embed_tokens = self.embed_tokens.clone()
            self.embed_tokens[self.mask_token_id] = mask_embedding
        self.lm_head = weights.pop("lm_head.weight", target.lm_head)
        self.fc = weights.pop("fc.weight")
        self.hidden_norm = weights.pop("hidden_norm.weight")
        self.norm = weights.pop("norm.weight")
        self.layers = [
            self.make_layer(weights, f"layers.{i}.") for i in range(self.shape.num_layers)
        ]
        if weights:
            raise ValueError(f"tensors without a place: {sorted(weights)}")

    def make_layer(self, weights: dict[str, Tensor], prefix: str) -> Layer:
        """A layer; its tensors are taken out of `weights`."""
        return Layer(weights, prefix, self.shape)

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> Self:
        """Reads `config.json`, the safetensors files and, if there, `mask_embedding.pt`."""
        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text())
        mask_embedding = None
        if (file := folder / "mask_embedding.pt").exists():
            saved = torch.load(file, weights_only=True)
            if isinstance(saved, dict):
                mask_id = config["dflash_config"]["mask_token_id"]
                if saved.get("mask_token_id", mask_id) != mask_id:
                    raise ValueError(f"{file} is for another mask token than {mask_id}")
                saved = saved["embedding"]
            mask_embedding = saved.reshape(-1).float()
        return cls(config, read_weights(folder), mask_embedding, target)

    @torch.inference_mode()
    def context(self, states: Sequence[Tensor]) -> list[KeyValue]:
        """Keys and values of every drafter layer for tokens at positions 0..n-1.

        `states` is what `Target.forward` returned for them. Each row depends on its own token's
        states only, so a prefix of the rows is the context of that prefix.
        """
        x = self.context_rows(states)
        positions = torch.arange(x.shape[0])
        return [layer.key_value(x, positions) for layer in self.layers]

    @torch.inference_mode()
    def context_rows(self, states: Sequence[Tensor]) -> Tensor:
        """float32 [n, hidden], what the drafter reads of the target's states."""
        features = torch.cat([states[i] for i in self.state_ids], dim=-1) @ self.fc.T
        return rms_norm(features, self.hidden_norm, self.shape.rms_norm_eps)

    def draft(
        self,
        context: Sequence[KeyValue],
        anchor_token: int,
        anchor_position: int,
        *,
        num_masks: int | None = None,
        max_model_len: int | None = None,
    ) -> Tensor:
        """Logits float32 [num_masks, vocab] after the anchor; arguments as of `hidden`."""
        hidden = self.hidden(
            context,
            anchor_token,
            anchor_position,
            num_masks=num_masks,
            max_model_len=max_model_len,
        )
        return self.logits(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., vocab] of final hidden states float32 [..., hidden]."""
        return hidden @ self.lm_head.T

    @torch.inference_mode()
    def hidden(
        self,
        context: Sequence[KeyValue],
        anchor_token: int,
        anchor_position: int,
        *,
        num_masks: int | None = None,
        max_model_len: int | None = None,
    ) -> Tensor:
        """Final hidden states of the positions after the anchor.

        Args:
            context: from `context`; the rows before `anchor_position` are used.
            anchor_token: the last sampled token, not yet seen by the target.
            anchor_position: its position, 0-based.
            num_masks: mask queries; None: block_size - 1, as the drafter was trained.
            max_model_len: as vLLM does at the length limit, clamp RoPE positions to the last one
                and hide keys beyond it.

        Returns:
            float32 [num_masks, hidden]; row i belongs to position anchor_position + 1 + i.
        """
        n = 1 + (self.block_size - 1 if num_masks is None else num_masks)
        limit = anchor_position + n if max_model_len is None else max_model_len
        positions = torch.arange(anchor_position, anchor_position + n).clamp(max=limit - 1)
        visible = torch.arange(anchor_position + n)[None] < limit
        x = self.embed_tokens[torch.tensor([anchor_token] + [self.mask_token_id] * (n - 1))]
        for layer, (k, v) in zip(self.layers, context, strict=True):
            past = (k[:anchor_position], v[:anchor_position])
            x, _ = layer.forward(x, positions, past, visible.expand(n, -1))
        return rms_norm(x[self.first_row :], self.norm, self.shape.rms_norm_eps)
