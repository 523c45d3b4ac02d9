# SPDX-License-Identifier: Apache-2.0
"""From a candidate head's raw scores to the log-probs of a lattice.

A drafter of a newer kind scores each candidate token given the candidate before it. The scores are
logits: only their differences within a row mean something. A tree compares paths of different
depth, so it needs normalised log-probs. `conditional_log_probs` makes them:

    log P(c | p) = log softmax over c of scores[d, p, c] + log of the mass of the K candidates

The mass is the sum of the candidates' probabilities over the whole vocabulary, as the drafter's own
head gives them before any condition. Without it a softmax over K says that the token is certainly
one of the K. Each depth would then be rated too high by what lies outside, deep paths most of all,
and a tree would grow long where it should grow wide. The mass does not know the token before, so it
is an estimate. The meter compares every claimed probability with what the target accepts
(round/meter.py), and the choice of a budget goes by that comparison: a constant error is corrected
there.

What vLLM computes, by family. R requests, D draft positions, K candidates, H the drafter's hidden
size, V its vocabulary. Everything happens in `_generate_draft`, inside the draft's FULL graph,
behind `_run_model`, unless said otherwise. `self` is the speculator.

DFlash (`DFlashSpeculator`; 0.32 and 0.33)
    hidden states [R * D, H] = `_run_model(...)[self.sample_indices[: R * D]]`
    logits [R * D, V] = `self.model.compute_logits(hidden)`, target's token ids
    The lattice has equal rows, so `build_trees` takes log q[d, c] as they are.

DFlash2 (`DFlash2Speculator`; `DFlash2Qwen3ForCausalLM`; in 0.33 `DFlash2BeamForCausalLM` too)
    ids int64 [R * D, K], logits float32 [R * D, K] = `self.model.compute_candidates(hidden)`, best
    first; scaled and soft-capped by `model.candidate_logits_processor` (Beam:
    `model.logits_processor`), but not normalised
    scores float32 [R, D, K, K] = `self._score_candidates(ids, logits, hidden [R, D, H])`, which is
    `self.model.model.candidate_selector(ids, logits, hidden, anchors)`, anchors int64 [R] =
    `self.input_buffers.input_ids[: R * Q : Q]`, Q = `self.num_query_per_req`
    scores[r, d, p, c] = logits[r, d, c] + <predecessor[p] * W hidden[r, d], successor[c]>; at d = 0
    all p are the anchor. A constant added to a row of logits is added to its scores, so log-probs
    may stand in for logits, and the mass comes with them. The same in 0.33.

LiLiCorr (`LiLiCorrSpeculator`, a `DFlash2Speculator`; `LiLiCorrForCausalLM`; 0.32 and 0.33)
    ids, log-probs float32 [R * D, K] = `self.model.compute_candidates(hidden)`, over the whole
    vocabulary: they are features of the head
    scores float32 [R, D, K, K] = `self._score_candidates(ids, log-probs, hidden)`, which is
    `self.model.model.lilicorr(self.target_embeddings(ids), log-probs, hidden, anchor_hidden [R, H],
    anchor_valid bool [R])`: `logit_scale` times a cosine. At d = 0 the K rows are the same.
    `prepare_context_anchor` fills the two anchor buffers from the last accepted row of
    `self.hidden_states`. 0.32 calls it in `propose`, before the graph, with the batch that
    `propose` got. 0.33 calls it with (num_reqs, query_start_loc, num_rejected). Inside the FULL
    graph these are `self.target_input_buffers.query_start_loc`, the target's own, and
    `self._num_rejected`, which `propose` stages.

DSpark (`DSparkSpeculator`; `Qwen3DSparkForCausalLM`, `Gemma4DSparkForCausalLM`,
    `K3DSparkForCausalLM`, in 0.33 `MuseSparkDSparkForCausalLM`)
    hidden states [R * D, H] = `_run_model(...)[self.sample_indices[: R * D]]`. With
    `self.sample_from_anchor` the anchor's row is the first of D = Q positions, else D = Q - 1.
    base logits [R * D, V] = `self.model.compute_draft_logits(hidden)`, ids of the draft vocabulary;
    `self.model.map_draft_to_target(ids)` gives the target's
    bias [N, V] = `self.model.markov_bias(self.model.markov_embed(tokens [N]))`, tokens of the
    target, embeddings [N, rank]. vLLM adds it for one token a position, in a loop over positions in
    `_sample_sequential`. A lattice wants it at K candidates after K others, from the rows
    `self.model.model.markov_head.markov_w2.weight[ids]`. vLLM gathers the same rows in
    `DSparkMarkovHead.apply_bias_gathered` (`dspark_draft_topk`), which takes one token before and
    scatters the sums over V, so it cannot give a table.
    0.33: `self.model.apply_output_logit_transform(logits)` follows the sum where the model has it.
    confidence [N] = `self.model.compute_confidence(hidden [N, H], embeddings [N, rank])`: the
    chance that the target takes the draft at a position, given that it took all before. It is there
    if `self.model.model.confidence_head` is not None. vLLM asks it for adaptive verification alone.
    vLLM has the low-rank head only and does not read `markov_head_type`; a head that needs the
    whole path is no lattice.

`CandidateSelector` and `LiLiCorrHead` are compiled (`support_torch_compile`): once, for any R and
for the D of their first call. They must always be called with all D positions of a draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.proposer.candidates import Candidates, top_k_log_probs

if TYPE_CHECKING:
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

    from vllm_ddtree.proposer.head import ShardedHead


def head_scores(
    speculator: DFlash2Speculator,
    candidate_ids: torch.Tensor,
    log_probs: torch.Tensor,
    hidden_states: torch.Tensor,
) -> torch.Tensor:
    """Raw scores of a DFlash2 or LiLiCorr draft, as vLLM's speculator asks its head for them.

    Args:
        speculator: vLLM's, of either family.
        candidate_ids: int64 [R, D, K], target's ids, best first. D is the draft's whole block.
        log_probs: float32 [R, D, K], over the whole vocabulary.
        hidden_states: [R, D, H], the drafter's.

    Returns:
        float32 [R, D, K, K].

    """
    return speculator._score_candidates(candidate_ids, log_probs, hidden_states)


class ConditionalDraft(NamedTuple):
    """What a draft gives to a lattice."""

    scores: torch.Tensor
    """float32 [R, D, K, K], raw."""
    log_probs: torch.Tensor
    """float32 [R, D, K], of the candidates without their condition, over the whole vocabulary."""
    token_ids: torch.Tensor
    """int64 [R, D, K], target's."""
    confidence: torch.Tensor | None
    """float32 [R, D, K]: that the draft at a position after each candidate of the position before
    is accepted; None without the head."""


def why_no_lattice(model: Qwen3DSparkForCausalLM) -> str | None:
    """Why a DSpark drafter's head gives no lattice, None if it does.

    Called once, after loading.
    """
    head = getattr(model.model, "markov_head", None)
    if head is None or not hasattr(head, "markov_w2"):
        return f"{type(model).__name__} has no Markov head"
    weight = getattr(head.markov_w2, "weight", None)
    if weight is None or not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return "its Markov head is quantised"
    return None


def dspark_draft(
    model: Qwen3DSparkForCausalLM,
    hidden_states: torch.Tensor,
    anchor_ids: torch.Tensor,
    candidates: Candidates,
) -> ConditionalDraft:
    """Candidates and raw scores of a DSpark draft.

    The first position's predecessor is known, so its candidates and their log-probs are those of
    the drafter itself. At the others the candidates are those of the base logits: they must serve
    every predecessor.

    Args:
        model: the drafter; `why_no_lattice` has no objection.
        hidden_states: [R, D, H], the drafter's.
        anchor_ids: int [R], the token before the first position.
        candidates: scratch for R * D rows of the draft vocabulary.

    """
    num_reqs, num_depths, _ = hidden_states.shape
    shape = (num_reqs, num_depths, candidates.top_k)
    transform = getattr(model, "apply_output_logit_transform", None)  # vLLM 0.33, Muse Spark
    base = model.compute_draft_logits(hidden_states.flatten(0, 1))
    anchor_embeds = model.markov_embed(anchor_ids)
    base.view(num_reqs, num_depths, -1)[:, 0] += model.markov_bias(anchor_embeds)
    log_probs = torch.empty(shape, dtype=torch.float32, device=base.device)
    ids = torch.empty(shape, dtype=torch.int64, device=base.device)
    top_k_log_probs(
        base if transform is None else transform(base),
        log_probs.flatten(0, 1),
        ids.flatten(0, 1),
        candidates,
    )
    values = base.gather(-1, ids.flatten(0, 1)).float().view(shape)
    return _markov_draft(model, hidden_states, anchor_embeds, values, log_probs, ids)


def sharded_dspark_draft(
    model: Qwen3DSparkForCausalLM,
    hidden_states: torch.Tensor,
    anchor_ids: torch.Tensor,
    head: ShardedHead,
) -> ConditionalDraft:
    """`dspark_draft` where every rank has the logits of its shard of the vocabulary.

    The candidates' log-probs stand in for their logits: a constant added to a row of scores changes
    nothing.

    Args:
        model: as in `dspark_draft`; no transform follows its logits.
        hidden_states: as in `dspark_draft`.
        anchor_ids: as in `dspark_draft`.
        head: gives ids of the draft vocabulary.

    """
    shape = (*hidden_states.shape[:2], head.candidates.top_k)
    anchor_embeds = model.markov_embed(anchor_ids)
    log_probs = torch.empty(shape, dtype=torch.float32, device=hidden_states.device)
    ids = torch.empty(shape, dtype=torch.int64, device=hidden_states.device)
    head.top_k(
        hidden_states.flatten(0, 1),
        log_probs.flatten(0, 1),
        ids.flatten(0, 1),
        model.markov_bias(anchor_embeds),
    )
    return _markov_draft(model, hidden_states, anchor_embeds, log_probs, log_probs, ids)


def _markov_draft(
    model: Qwen3DSparkForCausalLM,
    hidden_states: torch.Tensor,
    anchor_embeds: torch.Tensor,
    values: torch.Tensor,
    log_probs: torch.Tensor,
    ids: torch.Tensor,
) -> ConditionalDraft:
    """The draft of candidates that are known.

    Args:
        model: the drafter.
        hidden_states: [R, D, H], the drafter's.
        anchor_embeds: [R, rank], of the tokens before the first position.
        values: float32 [R, D, K], logits of the candidates by themselves.
        log_probs: float32 [R, D, K], of the candidates by themselves.
        ids: int64 [R, D, K], of the draft vocabulary.

    """
    shape, transform = values.shape, getattr(model, "apply_output_logit_transform", None)
    token_ids = model.map_draft_to_target(ids)
    before = model.markov_embed(token_ids[:, :-1])  # [R, D - 1, K, rank]
    processor = model.logits_processor
    bias = markov_bias(
        before,
        model.model.markov_head.markov_w2.weight[ids[:, 1:]],
        processor.scale,
        processor.soft_cap,
    )
    scores = values[:, :, None].repeat(1, 1, shape[2], 1)
    scores[:, 1:] += bias
    if transform is not None:
        scores = transform(scores)
    anchor_embeds = anchor_embeds[:, None, None].expand(-1, 1, shape[2], -1)
    confidence = _confidence(model, hidden_states, torch.cat((anchor_embeds, before), dim=1))
    return ConditionalDraft(scores, log_probs, token_ids, confidence)


def markov_bias(
    before: torch.Tensor, after: torch.Tensor, scale: float, soft_cap: float | None
) -> torch.Tensor:
    """The Markov bias of every candidate after every other.

    Scale and soft cap are those of a `LogitsProcessor`, which vLLM gives the bias too (vLLM
    layers/logits_processor.py).

    Args:
        before: [R, D, K, rank], embeddings of the candidates before.
        after: [R, D, K, rank], output rows of the candidates.
        scale: factor of the bias.
        soft_cap: of the bias; None: none.

    Returns:
        float32 [R, D, K, K].

    """
    bias = torch.matmul(before, after.transpose(-1, -2)).float()
    if soft_cap is not None:
        bias = torch.tanh(bias / soft_cap) * soft_cap
    return bias if scale == 1.0 else bias * scale


def _confidence(
    model: Qwen3DSparkForCausalLM, hidden_states: torch.Tensor, before: torch.Tensor
) -> torch.Tensor | None:
    """Confidence [R, D, K] after each candidate; None without the head."""
    head = model.model.confidence_head
    if head is None:
        return None
    shape = before.shape[:3]
    if not head.with_markov:  # the same after every candidate
        flat = hidden_states.flatten(0, 1)
        return model.compute_confidence(flat, flat).view(*shape[:2], 1).expand(shape)
    hidden = hidden_states[:, :, None].expand(*shape, -1)
    return model.compute_confidence(hidden.flatten(0, 2), before.flatten(0, 2)).view(shape)


def conditional_log_probs(
    scores: torch.Tensor,
    log_probs: torch.Tensor,
    out: torch.Tensor,
    confidence: torch.Tensor | None = None,
) -> None:
    """Write the log-probs of a lattice of raw scores.

    With a confidence, the best candidate of a row gets that probability, and the others share what
    is left in the proportions that they had: their sum is rescaled from 1 - P(best) to
    1 - confidence. So the row still sums to no more than 1.

    Reads and writes only device memory and allocates nothing, so it can be captured in a graph.

    Args:
        scores: float32 [R, D, K, K], raw; contiguous. -inf and NaN are no candidates.
        log_probs: float32 [R, D, K], of the candidates over the whole vocabulary, contiguous. -inf
            and NaN are no candidates, whatever their scores.
        out: float32 [R, D, K, K], out, contiguous; may be `scores`. -inf for no candidate.
        confidence: float32 [R, D, K], that the draft after each candidate is accepted; None: not
            known.

    Raises:
        ValueError: a shape, dtype or layout does not fit.

    """
    _check(scores, log_probs, out, confidence)
    num_reqs, num_depths, top_k = log_probs.shape
    if num_reqs == 0:
        return
    block = triton.next_power_of_2(top_k)
    _conditional_kernel[(num_reqs * num_depths,)](
        scores,
        log_probs,
        confidence,
        *((0, 0, 0) if confidence is None else confidence.stride()),
        out,
        num_depths,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=1 if block <= 16 else 4,
    )


def _check(
    scores: torch.Tensor,
    log_probs: torch.Tensor,
    out: torch.Tensor,
    confidence: torch.Tensor | None,
) -> None:
    """Host-side checks of shape, dtype and layout."""
    shape = log_probs.shape
    if len(shape) != 3:
        raise ValueError(f"log_probs must be [R, D, K], got {list(shape)}")
    square = torch.Size((*shape, shape[2]))
    for name, tensor, wanted in (
        ("scores", scores, square),
        ("log_probs", log_probs, shape),
        ("out", out, square),
        ("confidence", confidence, shape),
    ):
        if tensor is None:
            continue
        if tensor.shape != wanted or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} must be float32 {list(wanted)}, got {tensor.dtype} {list(tensor.shape)}"
            )
        if name != "confidence" and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; make it contiguous")


@triton.jit(do_not_specialize=["num_depths"])
def _conditional_kernel(
    scores_ptr,  # float32 [R, D, K, K]
    log_probs_ptr,  # float32 [R, D, K]
    confidence_ptr,  # float32 [R, D, K] or None
    confidence_stride_r,
    confidence_stride_d,
    confidence_stride_p,
    out_ptr,  # float32 [R, D, K, K]
    num_depths,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    table = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    own = tl.load(
        log_probs_ptr + table * TOP_K + candidate, mask=candidate < TOP_K, other=float("-inf")
    )
    own = tl.where(own > float("-inf"), own, float("-inf"))  # NaN goes too
    own_best = tl.max(own, axis=0)
    # All -inf: no candidate is left below, and any finite number will do.
    own_best = tl.where(own_best > float("-inf"), own_best, 0.0)

    before = tl.arange(0, BLOCK)[:, None]
    after = candidate[None, :]
    places = (table * TOP_K + before) * TOP_K + after
    in_table = (before < TOP_K) & (after < TOP_K)
    x = tl.load(scores_ptr + places, mask=in_table, other=float("-inf"))
    there = (x > float("-inf")) & (own > float("-inf"))[None, :]
    x = tl.where(there, x, float("-inf"))
    best = tl.max(x, axis=1)
    best = tl.where(best > float("-inf"), best, 0.0)
    total = tl.sum(tl.exp(x - best[:, None]), axis=1)
    log_total = tl.log(tl.where(total > 0.0, total, 1.0))
    # Step by step as `total`: scores that are the log-probs themselves stay as they are, bit by
    # bit, and so do the near-ties of the tree.
    mass = tl.sum(tl.where(in_table, tl.exp(own - own_best)[None, :], 0.0), axis=1)
    log_mass = tl.log(tl.where(mass > 0.0, mass, 1.0))
    value = x + ((own_best - best) + (log_mass - log_total))[:, None]

    if confidence_ptr is not None:
        row = tl.arange(0, BLOCK)
        req = table // num_depths
        depth = table % num_depths
        chance = tl.load(
            confidence_ptr
            + req * confidence_stride_r
            + depth * confidence_stride_d
            + row * confidence_stride_p,
            mask=row < TOP_K,
            other=0.5,
        )
        # Neither certain nor impossible: both logarithms stay finite.
        chance = tl.minimum(tl.maximum(chance, 1e-6), 1.0 - 1e-6)
        top = tl.max(value, axis=1)
        # Of equal ones the first.
        first = tl.min(tl.where(value == top[:, None], after, BLOCK), axis=1)
        left = tl.maximum(1.0 - tl.exp(top), 1e-6)
        others = value + (tl.log(1.0 - chance) - tl.log(left))[:, None]
        value = tl.where(after == first[:, None], tl.log(chance)[:, None], others)
        value = tl.where(there, value, float("-inf"))
    tl.store(out_ptr + places, value, mask=in_table)
