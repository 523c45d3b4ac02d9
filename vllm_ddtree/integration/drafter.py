# SPDX-License-Identifier: Apache-2.0
"""What vLLM reads from a drafter's configuration."""

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
