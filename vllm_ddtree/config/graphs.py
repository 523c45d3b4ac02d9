# SPDX-License-Identifier: Apache-2.0
"""Which verify steps get a CUDA graph: those of every budget and number of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ddtree.budget.tiers import TIERS
from vllm_ddtree.graphs.sizes import (
    MAX_AUTO_TOKENS,
    MAX_VERIFY_TOKENS,
    auto_sizes,
    verify_sizes,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_ddtree.config.speculative import DDTreeConfig

SIZE_NAMES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
"""vLLM's settings of capture sizes, in EngineArgs and in its compilation_config."""


def plan_sizes(vllm_config: VllmConfig) -> list[int]:
    """Capture sizes of the verify step, ascending, in tokens."""
    spec: DDTreeConfig = vllm_config.speculative_config
    scheduler = vllm_config.scheduler_config
    limit, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if spec.auto_budget:
        largest = min(tokens, limit * (spec.budget + 1), MAX_AUTO_TOKENS)
        return auto_sizes(largest, [budget + 1 for budget in TIERS], limit)
    ranges = spec.num_speculative_tokens_per_batch_size or [(1, limit, spec.budget)]
    tiers = [(nodes + 1, min(last, limit)) for first, last, nodes in ranges if first <= limit]
    own = vllm_config.compilation_config.cudagraph_capture_sizes
    return verify_sizes(own, tiers, min(tokens, MAX_VERIFY_TOKENS))


def set_capture_sizes(engine_args: EngineArgs, vllm_config: VllmConfig) -> None:
    """Set the capture sizes to `plan_sizes`, unless there are no graphs or the user gave sizes.

    Args:
        engine_args: as the user gave them.
        vllm_config: made from them; changed.

    """
    compilation, asked = vllm_config.compilation_config, engine_args.compilation_config
    if not compilation.cudagraph_capture_sizes:
        return
    if any(getattr(asked, n, None) or getattr(engine_args, n, None) for n in SIZE_NAMES):
        return
    sizes = plan_sizes(vllm_config)
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = sizes[-1]
