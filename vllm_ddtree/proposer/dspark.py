# SPDX-License-Identifier: Apache-2.0
"""Trees of DSpark drafters: a Markov head corrects each position by the token before."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from vllm_ddtree.proposer.candidates import Candidates
from vllm_ddtree.proposer.conditional import ConditionalSpeculator
from vllm_ddtree.proposer.head import ShardedHead, why_whole
from vllm_ddtree.proposer.scores import ConditionalDraft, dspark_draft, sharded_dspark_draft


class DDTreeDSpark(ConditionalSpeculator, DSparkSpeculator):
    """`ConditionalSpeculator` over vLLM's DSpark."""

    candidates: Candidates | None = None
    """For the logits of the whole vocabulary; made by the first (profiling) run, as any head."""

    def draft(self, num_reqs: int, hidden_states: torch.Tensor) -> ConditionalDraft:
        """As in `ConditionalSpeculator`."""
        if self.head is None and self.candidates is None:
            self._make_head()
        anchors = self.input_buffers.input_ids[self._anchor_idx[:num_reqs]]
        if isinstance(self.head, ShardedHead):
            return sharded_dspark_draft(self.model, hidden_states, anchors, self.head)
        assert self.candidates is not None
        return dspark_draft(self.model, hidden_states, anchors, self.candidates)

    def _make_head(self) -> None:
        """Candidates from the shards of all ranks, or from the logits of the whole vocabulary."""
        model, top_k = self.model, self.runtime.top_k
        rows = self.max_num_reqs * self.num_speculative_steps
        if why_whole(model, draft_ids=True) is None:
            self.head = ShardedHead(model, rows, top_k, self.device, draft_ids=True)
        else:
            vocab = model.logits_processor.org_vocab_size
            self.candidates = Candidates(rows, vocab, top_k, self.device)
