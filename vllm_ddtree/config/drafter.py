# SPDX-License-Identifier: Apache-2.0
"""What a drafter must be: a plain DFlash drafter, made for the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ddtree import integration
from vllm_ddtree.config.errors import bad_key

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config.speculative import SpeculativeConfig

MAX_BLOCK_SIZE = 32
OTHER_DRAFTERS = ("DFlash2", "LiLiCorr", "XPress")
"""Parts of the names of architectures that draft otherwise than DFlash."""


def draft_block_size(hf_config: PretrainedConfig) -> int | None:
    """`block_size` of a DFlash drafter's config.json, wherever the checkpoint keeps it."""
    nested = getattr(hf_config, "dflash_config", None) or {}
    value = getattr(hf_config, "block_size", None)
    return value if value is not None else nested.get("block_size")


def check_drafter(spec: SpeculativeConfig) -> int:
    """Check the drafter of a speculative config that vLLM has taken.

    Returns:
        Its block size: query tokens of a draft forward.

    Raises:
        ValueError: it is no plain DFlash drafter for this target.

    """
    draft = spec.draft_model_config

    def refuse(fix: str) -> ValueError:
        return bad_key("model", draft.model, fix)

    original: Any = getattr(draft.hf_config, "model", None) or draft.hf_config
    architectures = getattr(original, "architectures", None) or draft.architectures or ["unknown"]
    special = [a for a in architectures if any(other in a for other in OTHER_DRAFTERS)]
    if special:
        raise refuse(f"give a plain DFlash drafter, not {special[0]}")
    block_size = draft_block_size(draft.hf_config)
    layers = integration.aux_layers(spec)
    missing = [
        what
        for what, there in (
            ("block_size", block_size),
            ("dflash_config.mask_token_id", integration.mask_token_id(draft.hf_config) is not None),
            ("dflash_config.target_layer_ids", layers),
        )
        if not there
    ]
    if missing:
        raise refuse(
            f"give a DFlash drafter ({architectures[0]} without {', '.join(missing)} is none)"
        )
    assert block_size is not None and layers is not None
    if not 2 <= block_size <= MAX_BLOCK_SIZE:
        raise refuse(f"its block_size {block_size} is outside 2 to {MAX_BLOCK_SIZE}")
    num_layers = spec.target_model_config.get_total_num_hidden_layers()
    if max(layers) > num_layers:
        raise refuse(
            f"it reads target layer {max(layers)}, but the target has {num_layers} layers: "
            "give the drafter trained for this target"
        )
    return block_size
