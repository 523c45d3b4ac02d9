# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of drafters, written anew in another format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def as_speculators(drafter: Path, folder: Path, verifier: Path, **changes: Any) -> Path:
    """A DFlash drafter in the format of the speculators library, weights and all.

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
    dflash, block_size = plain.pop("dflash_config"), plain.pop("block_size")
    vocabulary = plain.pop("draft_vocab_size", plain["vocab_size"])
    for key in ("architectures", "num_target_layers"):
        del plain[key]
    config = {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in dflash["target_layer_ids"]],
        "block_size": block_size,
        "draft_vocab_size": vocabulary,
        "mask_token_id": dflash["mask_token_id"],
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block_size - 1}],
            "verifier": {"architectures": [], "name_or_path": str(verifier)},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": plain,
        **changes,
    }
    path.write_text(
        json.dumps({k: v for k, v in config.items() if k not in changes or v is not None})
    )
    return folder
