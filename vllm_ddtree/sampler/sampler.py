# SPDX-License-Identifier: Apache-2.0
"""The tree rejection sampler: vLLM's own sampling at every tree row, then the walk.

It stands where vLLM's `RejectionSampler` stands (v1/worker/gpu/spec_decode/rejection_sampler.py)
and keeps its interface. At every row the target's own choice is drawn by vLLM's `Sampler.sample`
(argmax, or the Gumbel draw keyed by seed and position after vLLM's own processing), with the
position of the row in the
sequence: committed length + depth. So a seeded request gets the tokens it gets without speculation.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    gather_draft_sampled,
    get_max_chunk_logits,
)

from vllm_ddtree import integration
from vllm_ddtree.round.kinds import StepKinds
from vllm_ddtree.round.runtime import Runtime
from vllm_ddtree.sampler.walk import path_logit_rows, walk


@dataclass
class TreeSamplerOutput(SamplerOutput):
    """vLLM's output of a step's sampling, and how each request verified."""

    kinds: StepKinds | None = None


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
            sampled_token_ids [num_reqs, 2 * (depth + 1)] int64: accepted tokens and bonus token,
            then the walk's facts (vLLM looks at the first num_sampled entries alone); num_sampled =
            accepted + 1 and num_rejected = drafts - accepted, [num_reqs] int32.

        """
        runtime, batch = self.runtime, input_batch
        num_nans = _nans(logits, batch) if self.sampler.compute_nans else None
        drafts, _ = gather_draft_sampled(
            batch.input_ids,
            batch.positions,  # linear: vLLM finds placeholders by the row's index
            batch.logits_indices,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            self.sampler.req_states.prefill_len.gpu,
        )
        checked = drafts if invalid_drafts is None else drafts.masked_fill(invalid_drafts, -1)
        num_reqs = batch.num_reqs
        # One tensor, so that vLLM's copy to the host takes the facts along.
        path_len = runtime.max_depth + 1
        both = torch.empty(num_reqs, 2 * path_len, dtype=torch.int64, device=logits.device)
        sampled, facts = both[:, :path_len], both[:, path_len:]
        num_sampled = torch.empty(num_reqs, dtype=torch.int32, device=logits.device)
        logprobs_dims = self.sampler.get_logprobs_dims(batch.idx_mapping_np)
        # In chunks of requests, as vLLM does, to bound the float32 copy of the logits.
        limit = get_max_chunk_logits(logits.shape[1])
        cu = batch.cu_num_logits_np
        chunks = [(0, num_reqs)]
        if logits.shape[0] > limit:
            chunks = integration.request_chunks(cu, limit)
        logprobs = [
            self._verify_chunk(
                logits,
                batch,
                start,
                end,
                drafts,
                checked,
                sampled,
                facts,
                num_sampled,
                logprobs_dims,
            )
            for start, end in chunks
        ]
        runtime.step.verified = True
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return TreeSamplerOutput(
            sampled_token_ids=both,
            logprobs_tensors=_join(logprobs, cu),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            kinds=runtime.step.kinds,
        )

    def _verify_chunk(
        self,
        logits: torch.Tensor,  # [num_logits, vocab]
        batch: InputBatch,
        start: int,
        end: int,
        drafts: torch.Tensor,  # [num_logits]
        checked: torch.Tensor,  # [num_logits], -1 where a draft may not be accepted
        sampled: torch.Tensor,  # [num_reqs, depth + 1], written for the chunk
        facts: torch.Tensor,  # [num_reqs, depth + 1], written for the chunk
        num_sampled: torch.Tensor,  # [num_reqs], written for the chunk
        logprobs_dims: tuple[int, int] | None,  # columns: best tokens, logprob_token_ids
    ) -> LogprobsTensors | None:
        """Choose at every row of requests start to end, walk, and take the emitted tokens'
        logprobs, each from the row that chose it."""
        runtime, cu = self.runtime, batch.cu_num_logits_np
        lo, hi = int(cu[start]), int(cu[end])
        choices, processed = self.sampler.sample(
            logits[lo:hi],
            batch.expanded_idx_mapping[lo:hi],
            batch.idx_mapping[start:end],
            batch.idx_mapping_np[start:end],
            runtime.rows.positions[batch.logits_indices[lo:hi]],
            drafts[lo:hi],
            batch.expanded_local_pos[lo:hi],
            batch.seq_lens_cpu_upper_bound.numpy()[start:end],
            return_logprobs=logprobs_dims is not None,
        )
        cu_num_logits = batch.cu_num_logits[start : end + 1] - lo if start else batch.cu_num_logits
        walk(
            choices,
            checked[lo:hi],
            runtime.trees.parents,
            batch.idx_mapping[start:end],
            cu_num_logits,
            batch.query_start_loc[start : end + 1],
            sampled[start:end],
            num_sampled[start:end],
            runtime.path_rows[start:end],
            runtime.path_lens[start:end],
            runtime.rows.path,
            runtime.trees.chain,
            runtime.trees.claims[:, int(runtime.step.as_chains)],
            runtime.meter.accepted(runtime.step.as_chains),
            facts[start:end],
        )
        if logprobs_dims is None:
            return None
        rows = path_logit_rows(
            runtime.path_rows[start:end],
            runtime.path_lens[start:end],
            cu_num_logits[: end - start + 1],
            torch.empty(hi - lo, dtype=torch.int64, device=logits.device),
        )
        use_processed = self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        # Not vLLM's `_get_logprobs_tensors`, which leaves out `logprob_token_ids`.
        return compute_topk_scores(
            (processed if use_processed else logits[lo:hi])[rows],
            logprobs_dims[0],
            choices[rows],
            (cu[start : end + 1] - lo).tolist() if hi - lo != end - start else None,
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.expanded_idx_mapping[lo:hi],
            max_per_req_token_ids=logprobs_dims[1],
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


def _nans(logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
    """NaNs in each request's logits, int32 [num_reqs]; vLLM's own sampler counts them by row."""
    by_row = get_num_nans(logits)
    lengths = batch.cu_num_logits[1 : batch.num_reqs + 1] - batch.cu_num_logits[: batch.num_reqs]
    request = torch.repeat_interleave(lengths, output_size=by_row.shape[0])
    return by_row.new_zeros(batch.num_reqs).index_add_(0, request, by_row)


def _join(chunks: list[LogprobsTensors | None], cu_num_logits: Any) -> LogprobsTensors | None:
    """Logprobs of the whole batch; cu_num_logits is NumPy int32 [num_reqs + 1]."""
    there = [chunk for chunk in chunks if chunk is not None]
    if len(there) < 2:
        return there[0] if there else None
    return LogprobsTensors.cat(there, cu_num_generated_tokens=cu_num_logits.tolist())
