# SPDX-License-Identifier: Apache-2.0
"""Trees of DSpark drafters: a Markov head corrects each position by the token before."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from vllm_ddtree.proposer.candidates import Candidates
from vllm_ddtree.proposer.conditional import ConditionalSpeculator
from vllm_ddtree.proposer.scores import ConditionalDraft, dspark_draft


class DDTreeDSpark(ConditionalSpeculator, DSparkSpeculator):
    """`ConditionalSpeculator` over vLLM's DSpark."""

    candidates: Candidates | None = None
    """Made by the first (profiling) run, as the head of other families."""

    def draft(self, num_reqs: int, hidden_states: torch.Tensor) -> ConditionalDraft:
        """As in `ConditionalSpeculator`.

        The logits are those of the whole vocabulary, also with several ranks: the Markov head,
        which every rank holds whole, is added to the first position's before candidates are taken.
        """
        if self.candidates is None:
            rows = self.max_num_reqs * self.num_speculative_steps
            vocab = self.model.logits_processor.org_vocab_size
            self.candidates = Candidates(rows, vocab, self.runtime.top_k, self.device)
        anchors = self.input_buffers.input_ids[self._anchor_idx[:num_reqs]]
        return dspark_draft(self.model, hidden_states, anchors, self.candidates)
