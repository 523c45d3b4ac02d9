# SPDX-License-Identifier: Apache-2.0
"""What a target must be, as far as its configuration tells; `loaded_target` looks at the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ddtree.config.errors import bad_target

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig


def check_target(model: ModelConfig) -> None:
    """Raise ValueError for a target whose attention or state cannot follow a tree.

    Everything that the configuration tells. vLLM has recurrent state exactly where its
    configuration says so.
    """
    for bad, what in (
        (
            model.is_attention_free or (model.is_hybrid and not _follows_trees(model)),
            "recurrent layers other than gated delta net and Mamba2 beside attention (Mamba, KDA, "
            "short convolutions)",
        ),
        (model.is_encoder_decoder, "an encoder"),
        (hasattr(model.hf_text_config, "index_topk"), "sparse latent attention (an indexer)"),
        (getattr(model, "rswa_window", None) is not None, "reference sliding-window attention"),
    ):
        if bad:
            raise bad_target(model.model, f"it has {what}")


RECURRENT = (
    ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
)
"""Sizes that configurations name of recurrent layers that follow trees: gated delta net as in
Qwen3-Next and Qwen3.5, Mamba2 as in Nemotron-H. The loaded layers are looked at, too."""


def _follows_trees(model: ModelConfig) -> bool:
    """Whether a target's recurrent layers are of a kind that follows trees, by their sizes."""
    config = model.hf_text_config
    return any(all(hasattr(config, name) for name in names) for names in RECURRENT)
