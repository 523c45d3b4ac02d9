# SPDX-License-Identifier: Apache-2.0
"""The tree rejection sampler: vLLM's own sampling at every tree row, then the walk.

It stands where vLLM's `RejectionSampler` stands (v1/worker/gpu/spec_decode/rejection_sampler.py)
and keeps its interface. vLLM's `Sampler.sample` draws the target's own choice at every row: argmax,
or the Gumbel draw keyed by seed and position, after vLLM's own processing. A row's position is the
one that its token has in the sequence, committed length + depth. So a seeded request gets the
tokens that it gets without speculation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput, SamplingMaskTensors
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    gather_draft_sampled,
    get_max_chunk_logits,
)

from vllm_ddtree import integration
from vllm_ddtree.round.emitted import Emitted
from vllm_ddtree.round.kinds import StepKinds
from vllm_ddtree.round.layout import Layout
from vllm_ddtree.sampler.walk import path_logit_rows, walk
from vllm_ddtree.trace.write import make_writer

if TYPE_CHECKING:
    import numpy as np
    from vllm.config.speculative import SpeculativeConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from vllm_ddtree.round.runtime import Runtime


@dataclass
class TreeSamplerOutput(SamplerOutput):
    """vLLM's output of a step's sampling, and how each request verified."""

    kinds: StepKinds | None = None
    """How each request verified; None in a graph's capture."""


@dataclass
class _Drafts:
    """What the rows of a batch verify."""

    tokens: torch.Tensor
    """int [num_logits], the token of each row."""
    acceptable: torch.Tensor
    """int [num_logits], the same, -1 where a draft may not be accepted."""


@dataclass
class _Chunk:
    """A range of a batch's requests, and of their logits.

    A large batch is sampled in chunks, as in vLLM, to bound the float32 copy of the logits.
    """

    requests: slice
    logits: slice
    layout: Layout

    @classmethod
    def of(cls, batch: InputBatch, start: int, end: int) -> _Chunk:
        """Requests `start` to `end` of a batch."""
        first, last = int(batch.cu_num_logits_np[start]), int(batch.cu_num_logits_np[end])
        layout = Layout.of(batch).part(start, end, first)
        return cls(slice(start, end), slice(first, last), layout)


@dataclass
class _Wanted:
    """What a batch's requests want to know of their tokens."""

    logprobs: tuple[int, int] | None
    """Columns of best tokens, and of `logprob_token_ids`; None: no logprobs."""
    kept: int | None
    """Most tokens that a row's top_k keeps; None: no sampling masks."""

    @classmethod
    def of(cls, sampler: Sampler, batch: InputBatch) -> _Wanted:
        kept = None
        if sampler.return_sampling_mask:
            kept = int(sampler.sampling_states.top_k.np[batch.idx_mapping_np].max())
        return cls(sampler.get_logprobs_dims(batch.idx_mapping_np), kept)


@dataclass
class _Details:
    """What is known of a chunk's tokens besides themselves."""

    logprobs: LogprobsTensors | None = None
    masks: SamplingMaskTensors | None = None


class TreeRejectionSampler(RejectionSampler):
    """Sample-and-follow over the trees of a batch.

    Args:
        sampler: vLLM's `Sampler` of this runner.
        speculative_config: the engine's DDTreeConfig.
        device: where the logits are.
        runtime: the engine's trees, rows and paths.

    """

    def __init__(
        self,
        sampler: Sampler,
        speculative_config: SpeculativeConfig,
        device: torch.device,
        runtime: Runtime,
    ) -> None:
        super().__init__(sampler, speculative_config, device)
        self.runtime = runtime
        self._writer = make_writer(speculative_config)

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample every row, walk every tree.

        Args:
            logits: float [num_logits, vocab], the target's.
            input_batch: the step's batch.
            draft_logits: not read; trees are verified without them.
            invalid_drafts: bool [num_logits], drafts that a grammar refuses.

        Returns:
            vLLM's output, by request:

            sampled_token_ids: int64 [num_reqs, 2 * P], accepted tokens and bonus token, then the
                facts (`Emitted`). vLLM looks at the first num_sampled entries alone.
            num_sampled: int32 [num_reqs], accepted nodes + 1.
            num_rejected: int32 [num_reqs], drafts that were not accepted.

        """
        runtime, batch = self.runtime, input_batch
        num_nans = _nans(logits, batch) if self.sampler.compute_nans else None
        drafts = self._drafts(batch, invalid_drafts)
        emitted = Emitted.empty(batch.num_reqs, runtime.max_depth, logits.device)
        wanted = _Wanted.of(self.sampler, batch)
        details = [
            self._verify_requests(
                logits, batch, _Chunk.of(batch, *requests), drafts, emitted, wanted
            )
            for requests in self._chunks(batch, logits)
        ]
        runtime.step.verified = True
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            emitted.num_sampled,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        if self._writer is not None:
            prefill_lens = self.sampler.req_states.prefill_len.gpu
            self._writer.step(runtime, batch, emitted, num_sampled, prefill_lens)
        return TreeSamplerOutput(
            sampled_token_ids=emitted.tokens_and_facts,
            logprobs_tensors=_join([d.logprobs for d in details], batch.cu_num_logits_np),
            sampling_mask_tensors=_join_masks([d.masks for d in details]),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            kinds=runtime.step.kinds,
        )

    def _chunks(self, batch: InputBatch, logits: torch.Tensor) -> list[tuple[int, int]]:
        """(first request, end) of each chunk of a batch."""
        limit = get_max_chunk_logits(logits.shape[1])
        # Shared rows always fit (budget/share.py).
        if logits.shape[0] <= limit or self.runtime.step.shared:
            return [(0, batch.num_reqs)]
        return integration.request_chunks(batch.cu_num_logits_np, limit)

    def _drafts(self, batch: InputBatch, invalid_drafts: torch.Tensor | None) -> _Drafts:
        """The token of each row, from the batch's inputs."""
        tokens, _ = gather_draft_sampled(
            batch.input_ids,
            batch.positions,  # linear: vLLM finds placeholders by the row's index
            batch.logits_indices,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            self.sampler.req_states.prefill_len.gpu,
        )
        if invalid_drafts is None:
            return _Drafts(tokens, tokens)
        return _Drafts(tokens, tokens.masked_fill(invalid_drafts, -1))

    def _verify_requests(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        chunk: _Chunk,
        drafts: _Drafts,
        emitted: Emitted,
        wanted: _Wanted,
    ) -> _Details:
        """The stages for one chunk of the batch: sample, walk, details.

        A function of its own, so that a chunk's processed logits are freed before the next one's
        are made.
        """
        dims = wanted.logprobs
        choices, processed = self._sample(logits, batch, chunk, drafts, dims is not None)
        self._walk(choices, chunk, drafts, emitted)
        if dims is None and wanted.kept is None:
            return _Details()
        rows = self._path_rows(chunk, choices)
        logprobs = masks = None
        if dims is not None:
            use_processed = self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
            scored = processed if use_processed else logits[chunk.logits]
            logprobs = self._logprobs(scored[rows], choices[rows], batch, chunk, dims)
        if wanted.kept is not None:
            masks = self._masks(processed[rows], chunk, emitted, wanted.kept)
        return _Details(logprobs, masks)

    def _sample(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        chunk: _Chunk,
        drafts: _Drafts,
        with_logprobs: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's own choice at every row of a chunk.

        Returns:
            int64 [rows], the choices, and float [rows, vocab], the logits after processing.

        """
        requests, rows = chunk.requests, chunk.logits
        return self.sampler.sample(
            logits[rows],
            batch.expanded_idx_mapping[rows],
            batch.idx_mapping[requests],
            batch.idx_mapping_np[requests],
            self.runtime.rows.positions[batch.logits_indices[rows]],
            drafts.tokens[rows],
            batch.expanded_local_pos[rows],
            batch.seq_lens_cpu_upper_bound.numpy()[requests],
            return_logprobs=with_logprobs,
        )

    def _walk(
        self, choices: torch.Tensor, chunk: _Chunk, drafts: _Drafts, emitted: Emitted
    ) -> None:
        """Follow the choices down the trees of a chunk."""
        rt, start, end = self.runtime, chunk.requests.start, chunk.requests.stop
        walk(
            choices,
            drafts.acceptable[chunk.logits],
            rt.trees,
            chunk.layout,
            rt.paths.part(start, end),
            emitted.part(start, end),
            rt.meter.verified(rt.trees, rt.step.as_chains, rt.narrow_drafted),
        )

    def _path_rows(self, chunk: _Chunk, choices: torch.Tensor) -> torch.Tensor:
        """int64 [rows], after a chunk's walk: the rows of each request's path, then any."""
        start, end = chunk.requests.start, chunk.requests.stop
        return path_logit_rows(
            self.runtime.paths.part(start, end),
            chunk.layout.cu_num_logits[: end - start + 1],
            torch.empty(choices.shape[0], dtype=torch.int64, device=choices.device),
        )

    def _logprobs(
        self,
        scored: torch.Tensor,
        chosen: torch.Tensor,
        batch: InputBatch,
        chunk: _Chunk,
        dims: tuple[int, int],
    ) -> LogprobsTensors:
        """Logprobs of a chunk's emitted tokens, each from the row that chose it.

        Args:
            scored: float [rows, vocab], the logits that logprobs are made of, a path's first.
            chosen: int64 [rows], the choices in the same order.
            batch: the step's batch.
            chunk: of the batch.
            dims: columns of best tokens, and of `logprob_token_ids`.

        """
        start, end = chunk.requests.start, chunk.requests.stop
        cu_num_logits = batch.cu_num_logits_np[start : end + 1] - chunk.logits.start
        # Not vLLM's `_get_logprobs_tensors`, which leaves out `logprob_token_ids`.
        return compute_topk_scores(
            scored,
            dims[0],
            chosen,
            cu_num_logits.tolist() if scored.shape[0] != end - start else None,
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.expanded_idx_mapping[chunk.logits],
            max_per_req_token_ids=dims[1],
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    def _masks(
        self, processed: torch.Tensor, chunk: _Chunk, emitted: Emitted, kept: int
    ) -> SamplingMaskTensors:
        """The tokens among which each emitted token of a chunk was sampled.

        Args:
            processed: float [rows, vocab], logits after processing, a path's rows first.
            chunk: of the batch.
            emitted: of the batch, after the chunk's walk.
            kept: most tokens that a row keeps.

        """
        start, end = chunk.requests.start, chunk.requests.stop
        return SamplingMaskTensors.from_logits(
            processed,
            chunk.layout.cu_num_logits[: end - start + 1],
            emitted.num_sampled[start:end],
            kept,
            self.runtime.max_depth + 1,
        )


def _nans(logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
    """NaNs in each request's logits, int32 [num_reqs]; vLLM's own sampler counts them by row."""
    by_row = get_num_nans(logits)
    lengths = batch.cu_num_logits[1 : batch.num_reqs + 1] - batch.cu_num_logits[: batch.num_reqs]
    request = torch.repeat_interleave(lengths, output_size=by_row.shape[0])
    return by_row.new_zeros(batch.num_reqs).index_add_(0, request, by_row)


def _join(
    chunks: list[LogprobsTensors | None], cu_num_logits: np.ndarray
) -> LogprobsTensors | None:
    """Logprobs of the whole batch, None without any.

    Args:
        chunks: of each chunk.
        cu_num_logits: int32 [num_reqs + 1].

    """
    there = [chunk for chunk in chunks if chunk is not None]
    if len(there) < 2:
        return there[0] if there else None
    return LogprobsTensors.cat(there, cu_num_generated_tokens=cu_num_logits.tolist())


def _join_masks(chunks: list[SamplingMaskTensors | None]) -> SamplingMaskTensors | None:
    """Sampling masks of the whole batch, None without any."""
    there = [chunk for chunk in chunks if chunk is not None]
    if len(there) < 2:
        return there[0] if there else None
    return SamplingMaskTensors.cat(there)
