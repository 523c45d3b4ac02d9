# SPDX-License-Identifier: Apache-2.0
"""The tree rejection sampler: vLLM's own sampling at every tree row, then the walk.

It stands where vLLM's `RejectionSampler` stands (v1/worker/gpu/spec_decode/rejection_sampler.py)
and keeps its interface. At every row the target's own choice is drawn by vLLM's `Sampler.sample`
(argmax, or the Gumbel draw keyed by seed and position after vLLM's own processing), with the
position of the row in the
sequence: committed length + depth. So a seeded request gets the tokens it gets without speculation.
"""

from typing import Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    gather_draft_sampled,
    get_max_chunk_logits,
)

from vllm_ddtree import compat
from vllm_ddtree.runtime import Runtime
from vllm_ddtree.sampler.walk import path_logit_rows, walk


class TreeRejectionSampler(RejectionSampler):
    """Sample-and-follow over the trees of a batch.

    Args:
        sampler: vLLM's `Sampler` of this runner.
        speculative_config: the engine's DDTreeConfig.
        device: where the logits are.
        runtime: the engine's trees and rows.

    """

    def __init__(
        self, sampler: Any, speculative_config: Any, device: torch.device, runtime: Runtime
    ) -> None:
        super().__init__(sampler, speculative_config, device)
        self.runtime = runtime

    def __call__(
        self,
        logits: torch.Tensor,  # [num_logits, vocab]
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,  # [num_logits] bool
    ) -> SamplerOutput:
        """Accepted tokens and bonus token of every request.

        Returns:
            SamplerOutput with sampled_token_ids [num_reqs, depth + 1] int64, num_sampled = accepted
            + 1 and num_rejected = drafts - accepted, [num_reqs] int32.

        """
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        runtime, batch = self.runtime, input_batch
        drafts, _ = gather_draft_sampled(
            batch.input_ids,
            batch.positions,  # linear: vLLM finds placeholders by the row's index
            batch.logits_indices,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            self.sampler.req_states.prefill_len.gpu,
        )
        positions = runtime.rows.positions[batch.logits_indices]
        max_num_logprobs = self.sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        choices, processed = self._choose(
            logits, batch, drafts, positions, max_num_logprobs != NO_LOGPROBS
        )

        num_reqs = batch.num_reqs
        sampled = choices.new_empty(num_reqs, runtime.depth + 1)
        num_sampled = choices.new_empty(num_reqs, dtype=torch.int32)
        walk(
            choices,
            drafts if invalid_drafts is None else drafts.masked_fill(invalid_drafts, -1),
            runtime.trees.parents,
            batch.idx_mapping,
            batch.cu_num_logits,
            batch.query_start_loc,
            sampled,
            num_sampled,
            runtime.path_rows,
            runtime.path_lens,
            runtime.rows.path,
        )
        runtime.step.verified = True

        logprobs = None
        if max_num_logprobs != NO_LOGPROBS:
            logprobs = self._path_logprobs(
                logits if processed is None else processed,
                batch,
                sampled,
                num_sampled,
                max_num_logprobs,
            )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _choose(
        self,
        logits: torch.Tensor,  # [num_logits, vocab]
        batch: InputBatch,
        drafts: torch.Tensor,  # [num_logits]
        positions: torch.Tensor,  # [num_logits] int64
        return_logprobs: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target's own choice at every row, [num_logits] int64, and the processed logits if
        logprobs are to be taken from them. In chunks of requests, as vLLM does, to bound the fp32
        copy."""
        keep_processed = return_logprobs and self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        limit = get_max_chunk_logits(logits.shape[1])
        cu = batch.cu_num_logits_np
        chunks = [(0, batch.num_reqs)]
        if logits.shape[0] > limit:
            chunks = compat.request_chunks(cu, limit)
        seq_lens_np = batch.seq_lens_cpu_upper_bound.numpy()
        choices, kept = [], []
        for start, end in chunks:
            lo, hi = int(cu[start]), int(cu[end])
            chosen, processed = self.sampler.sample(
                logits[lo:hi],
                batch.expanded_idx_mapping[lo:hi],
                batch.idx_mapping[start:end],
                batch.idx_mapping_np[start:end],
                positions[lo:hi],
                drafts[lo:hi],
                batch.expanded_local_pos[lo:hi],
                seq_lens_np[start:end],
                return_logprobs=return_logprobs,
            )
            choices.append(chosen)
            if keep_processed:
                kept.append(processed)
        one = len(choices) == 1
        all_processed = (kept[0] if one else torch.cat(kept)) if kept else None
        return (choices[0] if one else torch.cat(choices)), all_processed

    def _path_logprobs(
        self,
        logits: torch.Tensor,  # [num_logits, vocab]
        batch: InputBatch,
        sampled: torch.Tensor,  # [num_reqs, depth + 1]
        num_sampled: torch.Tensor,  # [num_reqs]
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        """Logprobs of the emitted tokens, each from the row that chose it."""
        runtime = self.runtime
        rows = path_logit_rows(
            runtime.path_rows,
            runtime.path_lens,
            batch.cu_num_logits,
            torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device),
        )
        return self._get_logprobs_tensors(
            sampled,
            num_sampled,
            logits[rows],
            batch.cu_num_logits,
            batch.cu_num_logits_np,
            max_num_logprobs,
        )
