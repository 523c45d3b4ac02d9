# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the draft forward, sized in draft blocks."""

import copy

from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

from vllm_ddtree.graphs.sizes import context_sizes, draft_sizes


class DraftGraphManager(DFlashCudaGraphManager):
    """vLLM's DFlash graph manager (spec_decode/dflash/cudagraph.py) with capture sizes of its own.

    vLLM rounds the verify step's sizes to whole draft blocks. A draft has more tokens a request
    than a verify step of few nodes, so a batch may have a verify graph and yet be too large for any
    draft graph. Sizes counted in draft blocks close that gap.
    """

    def _sizes(self, verify_sizes: list[int]) -> list[int]:
        """Capture sizes, in tokens; none without those of the verify step."""
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        return draft_sizes(self.decode_query_len, self.max_num_reqs, tokens, verify_sizes)

    def _init_candidates(self) -> None:
        """List what to capture, by our sizes in place of the verify step's."""
        shared = self.vllm_config.compilation_config
        own = copy.copy(shared)
        own.cudagraph_capture_sizes = self._sizes(shared.cudagraph_capture_sizes or [])
        own.max_cudagraph_capture_size = max(own.cudagraph_capture_sizes, default=0)
        self.compilation_config = own
        try:
            super()._init_candidates()
        finally:
            self.compilation_config = shared


class ContextGraphManager(DraftGraphManager):
    """Graphs of the drafter's context alone, for steps after which nothing is drafted."""

    def _sizes(self, verify_sizes: list[int]) -> list[int]:
        """Capture sizes, in tokens; none without those of the verify step."""
        if not verify_sizes:
            return []
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        return context_sizes(self.decode_query_len, self.max_num_reqs, tokens)

    def holds(self, num_reqs: int) -> bool:
        """Whether a graph was captured that holds so many requests."""
        largest = max((desc.num_tokens for desc in self.graphs), default=0)
        return num_reqs * self.decode_query_len <= largest
