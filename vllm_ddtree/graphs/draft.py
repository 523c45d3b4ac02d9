# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the draft forward, sized in draft blocks."""

import copy
from typing import Any

from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

from vllm_ddtree.graphs.sizes import request_counts


class DraftGraphManager(DFlashCudaGraphManager):
    """vLLM's DFlash graph manager with capture sizes of its own.

    vLLM derives the draft's sizes from the verify step's, rounding tokens up to a whole number of blocks.
    With two token counts that leaves holes, so the sizes here are (requests) x (block size).
    """

    def _init_candidates(self) -> None:
        shared = self.compilation_config
        sizes = shared.cudagraph_capture_sizes
        if self.cudagraph_mode and sizes:
            max_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
            verify_len = self.vllm_config.speculative_config.budget + 1
            counts = request_counts(
                sizes, verify_len, min(self.max_num_reqs, max_tokens // self.decode_query_len)
            )
            own: Any = copy.copy(shared)
            own.cudagraph_capture_sizes = [n * self.decode_query_len for n in counts]
            own.max_cudagraph_capture_size = own.cudagraph_capture_sizes[-1] if counts else 0
            self.compilation_config = own
        try:
            super()._init_candidates()
        finally:
            self.compilation_config = shared
