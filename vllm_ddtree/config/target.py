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
            model.is_attention_free or (model.is_hybrid and not _has_gated_delta_net(model)),
            "recurrent layers other than gated delta net beside attention (Mamba, KDA, short "
            "convolutions)",
        ),
        (model.is_encoder_decoder, "an encoder"),
        (hasattr(model.hf_text_config, "index_topk"), "sparse latent attention (an indexer)"),
        (getattr(model, "rswa_window", None) is not None, "reference sliding-window attention"),
    ):
        if bad:
            raise bad_target(model.model, f"it has {what}")


def _has_gated_delta_net(model: ModelConfig) -> bool:
    """Whether a target's recurrent layers are those of Qwen3-Next and Qwen3.5, by their sizes."""
    config = model.hf_text_config
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")
    return all(hasattr(config, name) for name in names)
