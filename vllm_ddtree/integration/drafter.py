# SPDX-License-Identifier: Apache-2.0
"""What vLLM reads from a drafter's configuration."""

import json
from pathlib import Path
from typing import Any


def aux_layers(speculative_config: Any) -> tuple[int, ...] | None:
    """Target layers whose inputs the drafter reads, as vLLM numbers them (DFlash's ids + 1)."""
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

    return eagle3_utils.get_eagle3_aux_layers_from_config(speculative_config)


def mask_token_id(hf_config: Any) -> int | None:
    """The token id of a draft block's masked queries, None when the checkpoint has none."""
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    try:
        return get_parallel_drafting_token_id(hf_config)
    except ValueError:
        return None


def checkpoint_config(model: str, revision: str | None) -> dict[str, Any]:
    """A checkpoint's config.json as it stands on this machine, empty if it is not here.

    vLLM's own reading leaves out keys that it does not know (transformers_utils/configs/).
    """
    from vllm.transformers_utils.repo_utils import try_get_local_file

    path = try_get_local_file(model, "config.json", revision)
    return json.loads(path.read_text()) if isinstance(path, Path) else {}
