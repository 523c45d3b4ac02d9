# SPDX-License-Identifier: Apache-2.0
"""Trees of LiLiCorr drafters: attention over all candidates rates each after each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator

from vllm_ddtree.proposer.conditional import ConditionalSpeculator
from vllm_ddtree.proposer.scores import ConditionalDraft

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class DDTreeLiLiCorr(ConditionalSpeculator, LiLiCorrSpeculator):
    """`ConditionalSpeculator` over vLLM's LiLiCorr.

    The head also reads the last accepted row of the drafter's context, the anchor. vLLM 0.33 finds
    it inside the draft's graph, by the row layout of the target's batch. After a tree the context
    has a layout of its own, so the graph reads a copy of that.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.context_starts = torch.zeros(
            self.max_num_reqs + 1, dtype=torch.int32, device=self.device
        )
        """int32 [max_num_reqs + 1], first context row of each request of the draft in a graph."""

    def draft(self, num_reqs: int, hidden_states: torch.Tensor) -> ConditionalDraft:
        """As in `ConditionalSpeculator`."""
        return self.score(num_reqs, hidden_states)

    def _prepare_graph_replay(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> None:
        """vLLM 0.33: what a graph reads is staged before its replay."""
        starts = input_batch.query_start_loc[: input_batch.num_reqs + 1]
        self.context_starts[: len(starts)].copy_(starts)
        # The requests that pad the graph have no rows.
        self.context_starts[len(starts) :].fill_(input_batch.num_tokens)
        super()._prepare_graph_replay(input_batch, *args, **kwargs)

    def prepare_context_anchor(self, *args: Any) -> None:
        """Publish the anchors' states.

        vLLM 0.32 calls it with (batch, num_rejected) before the draft, 0.33 with (num_reqs,
        query_start_loc, num_rejected), the target's own query_start_loc inside the graph.
        """
        of_target = getattr(self, "target_input_buffers", None)  # None in the profiling run
        if len(args) == 3 and of_target is not None and args[1] is of_target.query_start_loc:
            args = (args[0], self.context_starts, args[2])
        super().prepare_context_anchor(*args)
