# SPDX-License-Identifier: Apache-2.0
"""How many tree rows a step may have on a target with recurrent layers.

What these layers keep of a step's tree rows until the accepted path is known takes memory by the
row (`stash.py`). Trees shrink where all of a step's would not fit, as they do where the step's
tokens are too few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_TREE_ROWS = 2048
"""At Qwen3.5-9B's sizes, 0.8 GB in all layers: the states of 15 requests."""


def max_tree_rows(vllm_config: VllmConfig) -> int:
    """Most tree rows of a step.

    Never fewer than a captured graph has, or than two rows a request.
    """
    scheduler = vllm_config.scheduler_config
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or [0]
    most = max(MAX_TREE_ROWS, 2 * scheduler.max_num_seqs, *sizes)
    return min(most, scheduler.max_num_batched_tokens)
