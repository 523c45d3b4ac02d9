# SPDX-License-Identifier: Apache-2.0
"""Which kind of drafter a checkpoint is, as vLLM tells them apart.

The sources are vLLM's `init_speculator` (v1/worker/gpu/spec_decode/__init__.py), its registry of
models, and its reading of the speculators library's format (transformers_utils/configs/).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Family(StrEnum):
    """How a drafter of parallel positions rates its candidates."""

    DFLASH = "DFlash"
    """Each position by itself."""
    DFLASH2 = "DFlash2"
    """Given the candidate before, by a low-rank selector."""
    LILICORR = "LiLiCorr"
    """Given the candidate before, by attention over all candidates."""
    DSPARK = "DSpark"
    """Given the token before, by a low-rank Markov head."""

    @property
    def method(self) -> str:
        """vLLM's method for its chain."""
        return "dspark" if self is Family.DSPARK else "dflash"

    @property
    def head_keys(self) -> tuple[str, ...]:
        """Keys without which vLLM cannot make the head, as the checkpoint has them."""
        return {
            Family.DFLASH2: (
                "dflash_config.conv_kernel_size",
                "dflash_config.conv_group_size",
                "dflash_config.selector_rank",
            ),
            Family.LILICORR: (
                "dflash_config.lilicorr_hidden_size",
                "dflash_config.lilicorr_num_layers",
                "dflash_config.lilicorr_num_heads",
                "dflash_config.lilicorr_mlp_ratio",
                "dflash_config.lilicorr_factor_dim",
                "dflash_config.lilicorr_vector_eps",
                "dflash_config.lilicorr_logit_scale",
            ),
            Family.DSPARK: ("markov_rank",),
        }.get(self, ())

    @property
    def candidates_key(self) -> str | None:
        """Key of `dflash_config` that fixes the number of candidates; None: any number will do."""
        return {
            Family.DFLASH2: "selector_top_k",
            Family.LILICORR: "lilicorr_candidate_topk",
        }.get(self)


ARCHITECTURES = {
    "DFlash2DraftModel": Family.DFLASH2,
    "DFlash2BeamDraftModel": Family.DFLASH2,
    "LiLiCorrDraftModel": Family.LILICORR,
    "Qwen3DSparkModel": Family.DSPARK,
    "Qwen3OmniDSparkModel": Family.DSPARK,
    "Gemma4DSparkModel": Family.DSPARK,
    "MuseSparkDSparkModel": Family.DSPARK,
}
"""Architectures that are no plain DFlash. Every other one is taken for it."""

SINCE = {"DFlash2BeamDraftModel": "0.33", "MuseSparkDSparkModel": "0.33"}
"""Architectures that only later vLLMs have, and the first one."""

REFUSED = {
    "XPress": "XPress corrects whole drafts, not candidates",
    "DSparkV41": "its layers are part of a DeepSeek-V4 target",
    "K3DSpark": "its layers have latent attention",
}
"""Parts of the names of architectures of which no tree is built -> the reason."""

SPECULATORS = {
    "dflash": Family.DFLASH,
    "dflash2": Family.DFLASH2,
    "dspark": Family.DSPARK,
}
"""`speculators_model_type` of the speculators library's format."""


def architectures(checkpoint: dict[str, Any]) -> list[str]:
    """The architectures that a drafter's config.json names, under vLLM's own names.

    vLLM calls a `DSparkDraftModel` of Qwen3's shape Qwen3DSparkModel (config/speculative.py).
    """
    named = checkpoint.get("architectures") or []
    if not isinstance(named, list):
        return []
    qwen3 = checkpoint.get("model_type") == "qwen3"
    return ["Qwen3DSparkModel" if qwen3 and a == "DSparkDraftModel" else a for a in named]


def is_known(architecture: str) -> bool:
    """Whether this vLLM has the architecture."""
    from vllm.model_executor.models.registry import ModelRegistry

    return architecture in ModelRegistry.get_supported_archs()
