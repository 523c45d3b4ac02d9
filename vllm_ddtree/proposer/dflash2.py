# SPDX-License-Identifier: Apache-2.0
"""Trees of DFlash2 drafters: a low-rank selector rates each candidate after each other."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

from vllm_ddtree.proposer.conditional import ConditionalSpeculator
from vllm_ddtree.proposer.scores import ConditionalDraft


class DDTreeDFlash2(ConditionalSpeculator, DFlash2Speculator):
    """`ConditionalSpeculator` over vLLM's DFlash2."""

    def draft(self, num_reqs: int, hidden_states: torch.Tensor) -> ConditionalDraft:
        """As in `ConditionalSpeculator`."""
        return self.score(num_reqs, hidden_states)
