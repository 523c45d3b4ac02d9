# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of drafters, written anew in another format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

DSPARK_KEYS = (
    "markov_rank",
    "markov_head_type",
    "sample_from_anchor",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def as_speculators(drafter: Path, folder: Path, verifier: Path, **changes: Any) -> Path:
    """A DFlash, DFlash2 or DSpark drafter in the format of the speculators library, with weights.

    As its DFlashSpeculatorConfig writes it: the decoder under `transformer_layer_config`, layer
    ids counted from the embedding, what concerns the draft at the top.

    Args:
        drafter: the plain checkpoint's folder.
        folder: the new one.
        verifier: the target that it names.
        changes: of the new config.json's top level; None takes a key away.

    """
    shutil.copytree(drafter, folder)
    folder.chmod(0o755)
    path = folder / "config.json"
    path.chmod(0o644)
    plain = json.loads(path.read_text())
    kind = {
        "DFlashDraftModel": "dflash",
        "DFlash2DraftModel": "dflash2",
        "Qwen3DSparkModel": "dspark",
    }[plain["architectures"][0]]
    nested = ("mask_token_id", "target_layer_ids")
    dflash = plain.pop("dflash_config", None) or {key: plain.pop(key) for key in nested}
    block_size = plain.pop("block_size")
    own = {key: value for key, value in dflash.items() if key not in nested}
    for key in DSPARK_KEYS:
        if key in plain:
            own[key] = plain.pop(key)
    vocabulary = plain.pop("draft_vocab_size", plain["vocab_size"])
    for key in ("architectures", "num_target_layers"):
        del plain[key]
    config = {
        "architectures": [
            {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}[kind] + "Speculator"
        ],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in dflash["target_layer_ids"]],
        "block_size": block_size,
        "draft_vocab_size": vocabulary,
        "mask_token_id": dflash["mask_token_id"],
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block_size - 1}],
            "verifier": {"architectures": [], "name_or_path": str(verifier)},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": plain,
        **own,
        **changes,
    }
    path.write_text(
        json.dumps({k: v for k, v in config.items() if k not in changes or v is not None})
    )
    return folder
