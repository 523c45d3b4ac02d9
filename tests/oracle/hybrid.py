# SPDX-License-Identifier: Apache-2.0
"""A target with recurrent layers, as Transformers computes it: float32, CPU, one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class HybridTarget:
    """What the oracle needs of a target (`qwen3.Target`), for any model of Transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.embed_tokens: Tensor = model.get_input_embeddings().weight.detach()
        self.lm_head: Tensor = model.get_output_embeddings().weight.detach()

    @classmethod
    def load(cls, folder: str | Path) -> HybridTarget:
        """Reads a checkpoint folder."""
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> tuple[Tensor, list[Tensor], None]:
        """Logits [n, vocab], and what enters each layer, [n, hidden] each."""
        out = self.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
        return out.logits[0], [states[0] for states in out.hidden_states], None

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The most probable continuation, its tokens one by one."""
        tokens = list(prompt_ids)
        for _ in range(max_tokens):
            tokens.append(int(self.forward(tokens)[0][-1].argmax()))
        return tokens[len(prompt_ids) :]
