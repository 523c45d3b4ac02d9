# SPDX-License-Identifier: Apache-2.0
"""Scores of candidate heads: vLLM's own heads and walks against the lattices made of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.lilicorr import LiLiCorrHead
from vllm.model_executor.models.qwen3_dflash2 import CandidateSelector
from vllm.model_executor.models.qwen3_dspark import (
    DSparkConfidenceHead,
    DSparkMarkovHead,
    Qwen3DSparkForCausalLM,
)
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import CandidateSampler, DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator

from tests.oracle.lattice import conditional
from vllm_ddtree.proposer.candidates import Candidates
from vllm_ddtree.proposer.head import WholeHead
from vllm_ddtree.proposer.logits import logits_processor
from vllm_ddtree.proposer.scores import (
    conditional_log_probs,
    dspark_draft,
    head_scores,
    why_no_lattice,
)
from vllm_ddtree.tree.lattice_reference import lattice_chain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's layers on one rank, not compiled."""
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    with set_current_vllm_config(config), torch.device(DEVICE):
        yield


def fill(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights around 0, large enough for conditions to change the order."""
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(values.to(parameter.dtype))


def ready(module: torch.nn.Module) -> None:
    """What vLLM does when all weights are there."""
    for layer in module.modules():
        method: Any = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)


def lattice_of(
    scores: torch.Tensor, log_probs: torch.Tensor, confidence: torch.Tensor | None = None
) -> np.ndarray:
    out = torch.full_like(scores, 7.0)
    conditional_log_probs(scores.contiguous(), log_probs.contiguous(), out, confidence)
    return out.cpu().numpy()


def draw(num_reqs: int, num_depths: int, top_k: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Scores [R, D, K, K] and log-probs [R, D, K] of part of a vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(num_reqs, num_depths, top_k, top_k, generator=generator)
    logits = 2 * torch.randn(num_reqs, num_depths, 2 * top_k, generator=generator)
    log_probs = logits.log_softmax(-1).sort(-1, descending=True).values[..., :top_k]
    return scores.to(DEVICE), log_probs.contiguous().to(DEVICE)


@pytest.mark.parametrize("top_k", [1, 3, 16, 33, 64])
def test_log_probs_equal_the_oracles(top_k: int) -> None:
    scores, log_probs = draw(2, 3, top_k, top_k)
    expected = [
        conditional(s.numpy(), u.numpy())
        for s, u in zip(scores.cpu(), log_probs.cpu(), strict=True)
    ]
    np.testing.assert_allclose(lattice_of(scores, log_probs), expected, atol=2e-5)
    out = scores.clone()
    conditional_log_probs(out, log_probs, out)  # in place
    np.testing.assert_allclose(out.cpu(), expected, atol=2e-5)


@pytest.mark.parametrize("top_k", [1, 3, 4, 16, 33, 64])
def test_scores_without_a_condition_change_no_bit(top_k: int) -> None:
    """So that the tree is the plain drafter's, near-ties and all."""
    _, log_probs = draw(4, 15, top_k, top_k)
    scores = log_probs[:, :, None].expand(-1, -1, top_k, -1)
    np.testing.assert_array_equal(lattice_of(scores, log_probs), scores.cpu().numpy())


@pytest.mark.parametrize("gone", [-INF, float("nan")])
def test_missing_candidates_have_no_log_prob(gone: float) -> None:
    scores, log_probs = draw(1, 6, 5, 0)
    scores[0, 0, 1, 2] = gone
    scores[0, 1, 3] = gone  # nothing after candidate 3
    log_probs[0, 2, 4] = gone  # no such candidate, whatever its score
    log_probs[0, 3] = gone  # no candidate at all
    scores[0, 4] = gone
    expected = conditional(scores[0].cpu().numpy(), log_probs[0].cpu().numpy())
    assert np.isneginf(expected).sum() == 1 + 5 + 5 + 25 + 25
    found = lattice_of(scores, log_probs)[0]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    confident = lattice_of(scores, log_probs, torch.full((1, 6, 5), 0.3, device=DEVICE))[0]
    np.testing.assert_array_equal(np.isneginf(confident), np.isneginf(expected))


def test_rows_sum_to_the_mass_of_their_candidates() -> None:
    scores, log_probs = draw(2, 4, 8, 1)
    sums = np.exp(lattice_of(scores, log_probs)).sum(-1)
    mass = log_probs.exp().sum(-1).cpu().numpy()
    assert mass.max() < 0.999 and mass.min() > 0.5
    np.testing.assert_allclose(sums, np.repeat(mass[..., None], 8, axis=-1), rtol=1e-5)


def test_confidence_is_the_best_candidates_probability() -> None:
    scores, log_probs = draw(2, 4, 8, 2)
    confidence = torch.rand(2, 4, 8, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    before = np.exp(lattice_of(scores, log_probs).astype(float))
    wide = torch.zeros(2, 4, 8, 2, device=DEVICE)
    wide[..., 0] = confidence
    after = np.exp(lattice_of(scores, log_probs, wide[..., 0]).astype(float))
    best = before.argmax(-1)[..., None]
    chance = confidence.cpu().numpy()[..., None]
    np.testing.assert_allclose(np.take_along_axis(after, best, -1), chance, rtol=1e-4)
    factor = (1 - chance) / (1 - np.take_along_axis(before, best, -1))
    expected = before * factor
    np.put_along_axis(expected, best, chance, -1)
    np.testing.assert_allclose(after, expected, rtol=2e-3, atol=1e-7)
    assert (after.sum(-1) <= 1 + 1e-5).all()


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_confidence_may_be_certain(chance: float) -> None:
    scores, log_probs = draw(1, 3, 4, 4)
    scores[0, 0] = torch.tensor([200.0, 0.0, 0.0, 0.0])  # a row that is certain, too
    log_probs[0, 0] = torch.tensor([0.0, -200.0, -200.0, -200.0])
    found = lattice_of(scores, log_probs, torch.full((1, 3, 4), chance, device=DEVICE))
    assert np.isfinite(found).all()
    assert (found <= 0).all()


def test_no_requests() -> None:
    empty = torch.zeros(0, 3, 4, 4, device=DEVICE)
    conditional_log_probs(empty, empty[:, :, 0], empty)


@pytest.mark.parametrize(
    "argument,change",
    [
        ("scores", lambda t: t.double()),
        ("scores", lambda t: t[:, :, :3]),
        ("scores", lambda t: t.mT),
        ("log_probs", lambda t: t[0]),
        ("log_probs", lambda t: t.half()),
        ("log_probs", lambda t: t.new_zeros(2, 4, 3).mT),
        ("out", lambda t: t[:1]),
        ("out", lambda t: t.mT),
        ("confidence", lambda t: t[:, :2]),
    ],
)
def test_arguments_that_do_not_fit(argument: str, change: Any) -> None:
    scores, log_probs = draw(2, 3, 4, 0)
    arguments = {
        "scores": scores,
        "log_probs": log_probs,
        "out": torch.empty_like(scores),
        "confidence": log_probs.exp(),
    }
    conditional_log_probs(**arguments)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=argument):
        conditional_log_probs(**arguments)


# vLLM's DFlash2 and LiLiCorr heads, and the walk that vLLM drafts with.

REQS, DEPTHS, TOP_K, HIDDEN, VOCAB = 3, 5, 8, 16, 50


def draft(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Candidate ids and log-probs, best first, and hidden states."""
    logits = 2 * torch.randn(REQS, DEPTHS, VOCAB, generator=generator)
    log_probs, ids = logits.log_softmax(-1).topk(TOP_K, dim=-1)
    hidden = torch.randn(REQS, DEPTHS, HIDDEN, generator=generator)
    return ids.to(DEVICE), log_probs.to(DEVICE), hidden.to(DEVICE)


def vllm_walk(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The greedy draft of vLLM's `CandidateSampler`.

    Triton's interpreter cannot run vLLM's kernel. On the CPU its lines stand here in PyTorch (vLLM
    v1/worker/gpu/spec_decode/dflash2/speculator.py, `_selector_walk_kernel`).
    """
    tokens = torch.zeros(REQS, DEPTHS, dtype=torch.int64, device=DEVICE)
    rows = torch.arange(REQS, device=DEVICE)
    if DEVICE == "cpu":
        previous = torch.zeros_like(rows)
        for step in range(DEPTHS):
            previous = scores[rows, step, previous].argmax(-1)
            tokens[:, step] = ids[rows, step, previous]
        return tokens
    sampler = CandidateSampler(REQS, DEPTHS, TOP_K, torch.device(DEVICE))
    sampler.sample(
        ids,
        scores,
        REQS,
        torch.arange(REQS * DEPTHS, device=DEVICE) + 100,
        rows.repeat_interleave(DEPTHS),
        torch.zeros(REQS, device=DEVICE),
        rows,
        tokens,
        None,
        False,
    )
    return tokens


def speculator_of(cls: Any, model: Any, **attributes: Any) -> Any:
    """A speculator that has what its candidate head reads, and nothing else."""
    speculator = cls.__new__(cls)
    tokens = torch.full((REQS * (DEPTHS + 1),), 9, device=DEVICE)
    tokens[:: DEPTHS + 1] = torch.arange(REQS, device=DEVICE) + 11  # anchors, then masks
    buffers = SimpleNamespace(input_ids=tokens)
    names = {"model": model, "num_query_per_req": DEPTHS + 1, "input_buffers": buffers}
    speculator.__dict__.update(names | attributes)
    return speculator


def selector_speculator(generator: torch.Generator) -> Any:
    selector = CandidateSelector(
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        rank=4,
        top_k=TOP_K,
        params_dtype=torch.float32,
        prefix="selector",
    )
    fill(selector, generator)
    ready(selector)
    model = SimpleNamespace(model=SimpleNamespace(candidate_selector=selector))
    return speculator_of(DFlash2Speculator, model)


def lilicorr_speculator(generator: torch.Generator) -> Any:
    config = {
        "lilicorr_hidden_size": 8,
        "lilicorr_candidate_topk": TOP_K,
        "lilicorr_num_heads": 2,
        "lilicorr_mlp_ratio": 2,
        "lilicorr_factor_dim": 4,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 6.0,
        "lilicorr_num_layers": 1,
    }
    head = LiLiCorrHead(
        model_hidden_size=HIDDEN, block_size=DEPTHS + 1, rms_norm_eps=1e-6, config=config
    )
    fill(head, generator)
    head.materialize_inference_buffers(torch.device(DEVICE), torch.float32)
    ready(head)
    embeddings = torch.randn(VOCAB, HIDDEN, generator=generator).to(DEVICE)
    return speculator_of(
        LiLiCorrSpeculator,
        SimpleNamespace(model=SimpleNamespace(lilicorr=head)),
        target_embeddings=lambda ids: embeddings[ids],
        anchor_hidden=torch.randn(REQS, HIDDEN, generator=generator).to(DEVICE),
        anchor_valid=torch.ones(REQS, dtype=torch.bool, device=DEVICE),
    )


@pytest.mark.parametrize("make", [selector_speculator, lilicorr_speculator])
@torch.inference_mode()
def test_chain_is_vllms_own_draft(make: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    speculator = make(generator)
    moved = 0
    for _ in range(3):
        ids, log_probs, hidden = draft(generator)
        scores = head_scores(speculator, ids, log_probs, hidden)
        assert scores.shape == (REQS, DEPTHS, TOP_K, TOP_K)
        # The first position has one predecessor, the anchor.
        torch.testing.assert_close(scores[:, 0], scores[:, 0, :1].expand(-1, TOP_K, -1))
        assert (scores[:, 1:, 0] - scores[:, 1:, 1]).abs().max() > 0.1
        lattice = lattice_of(scores, log_probs)
        walked = vllm_walk(ids, scores).tolist()
        for r in range(REQS):
            tokens, _ = lattice_chain(lattice[r], ids[r].cpu().numpy())
            assert tokens.tolist() == walked[r]
        moved += int((torch.tensor(walked) != ids[:, :, 0].cpu()).sum())
    assert moved > 10  # conditions do change the draft


@torch.inference_mode()
def test_dflash2_scores_of_logits_and_of_log_probs_are_one_lattice() -> None:
    generator = torch.Generator().manual_seed(6)
    speculator = selector_speculator(generator)
    ids, log_probs, hidden = draft(generator)
    logits = log_probs + torch.randn(REQS, DEPTHS, 1, generator=generator).to(DEVICE)
    ours = lattice_of(head_scores(speculator, ids, log_probs, hidden), log_probs)
    theirs = lattice_of(head_scores(speculator, ids, logits, hidden), log_probs)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_candidates_have_a_processor_of_their_own() -> None:
    own, plain = object(), object()
    head = {"compute_candidates": None, "logits_processor": plain}
    assert logits_processor(SimpleNamespace(candidate_logits_processor=own, **head)) is own
    assert logits_processor(SimpleNamespace(**head)) is plain  # Beam's
    of_dflash = SimpleNamespace(candidate_logits_processor=own, logits_processor=plain)
    assert logits_processor(of_dflash) is plain


@pytest.mark.parametrize(("scale", "soft_cap"), [(1.0, None), (1.7, None), (1.7, 2.5)])
@torch.inference_mode()
def test_candidates_are_vllms(scale: float, soft_cap: float | None) -> None:
    """Ids and logits of `get_top_k_tokens`, but that ours are normalised."""
    generator = torch.Generator().manual_seed(7)
    head = ParallelLMHead(VOCAB, HIDDEN)
    fill(head, generator)
    ready(head)
    processor = LogitsProcessor(VOCAB, scale=scale, soft_cap=soft_cap)
    model = SimpleNamespace(
        compute_candidates=None, candidate_logits_processor=processor, lm_head=head
    )
    hidden = torch.randn(5, HIDDEN, generator=generator).to(DEVICE)
    log_probs = torch.empty(5, TOP_K, device=DEVICE)
    ids = torch.empty(5, TOP_K, dtype=torch.int64, device=DEVICE)
    WholeHead(model, 5, TOP_K).top_k(hidden, log_probs, ids)
    their_ids, logits = processor.get_top_k_tokens(head, hidden, TOP_K)
    assert ids.tolist() == their_ids.tolist()
    difference = logits - log_probs
    torch.testing.assert_close(difference, difference[:, :1].expand_as(difference))
    if soft_cap is None:
        raw = hidden @ head.weight[:VOCAB].T * scale
        torch.testing.assert_close(log_probs, raw.log_softmax(-1).gather(-1, ids))


# vLLM's DSpark head, and the loop that vLLM drafts with.


def dspark_model(
    generator: torch.Generator, offsets: torch.Tensor | None = None, **options: Any
) -> Qwen3DSparkForCausalLM:
    """A drafter of one logit matrix and vLLM's heads over `VOCAB` draft tokens."""
    model = Qwen3DSparkForCausalLM.__new__(Qwen3DSparkForCausalLM)
    torch.nn.Module.__init__(model)
    confidence = options.pop("confidence", True)
    vocab = VOCAB if offsets is None else VOCAB + int(offsets.max())
    model.model = torch.nn.Module()
    model.model.markov_head = DSparkMarkovHead(vocab, VOCAB, 4, "markov_head")
    model.model.confidence_head = None
    if confidence is not None:
        size = HIDDEN + 4 if confidence else HIDDEN
        model.model.confidence_head = DSparkConfidenceHead(
            size, "confidence", bias=True, with_markov=confidence
        )
    model.lm_head = DSparkMarkovHead(vocab, VOCAB, HIDDEN, "head").markov_w2
    model.logits_processor = LogitsProcessor(VOCAB, **options)
    fill(model, generator)
    ready(model)
    model.draft_id_to_target_id = None if offsets is None else torch.nn.Parameter(offsets, False)
    return model.to(DEVICE)


def vllm_draft(
    model: Qwen3DSparkForCausalLM, hidden: torch.Tensor, anchors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens and confidences of `DSparkSpeculator._sample_sequential`."""
    num_reqs, num_depths, _ = hidden.shape
    speculator: Any = DSparkSpeculator.__new__(DSparkSpeculator)
    speculator.__dict__.update(
        model=model,
        num_speculative_steps=num_depths,
        sample_indices=torch.arange(num_reqs * num_depths),
        sample_idx_mapping=torch.arange(num_reqs).repeat_interleave(num_depths),
        sample_pos=torch.arange(num_reqs * num_depths),
        input_buffers=SimpleNamespace(input_ids=anchors),
        draft_tokens=torch.zeros(num_reqs, num_depths, dtype=torch.int64),
        draft_token_confidence_probs=torch.zeros(num_reqs, num_depths),
        draft_logits=None,
        use_confidence_head=model.model.confidence_head is not None,
        acceptance_estimator=None,
        _draft_topk=None,
        _anchor_idx=torch.arange(num_reqs),
        _step_cols=torch.arange(num_depths, dtype=torch.int32),
    )
    speculator._sample_sequential(num_reqs, hidden.flatten(0, 1))
    return speculator.draft_tokens, speculator.draft_token_confidence_probs


def dspark_case(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = 0.5 * torch.randn(REQS, DEPTHS, HIDDEN, generator=generator)
    anchors = torch.randint(VOCAB, (REQS,), generator=generator)
    return hidden.to(DEVICE), anchors.to(DEVICE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.5},
        {"soft_cap": 3.0},
        {"soft_cap": 3.0, "scale": 0.25},
        {"confidence": False},
        {"confidence": None},
    ],
)
@pytest.mark.parametrize("mapped", [False, True])
@torch.inference_mode()
def test_dspark_over_the_whole_vocabulary_is_the_drafter(options: dict, mapped: bool) -> None:
    """With all tokens candidates nothing is approximate."""
    generator = torch.Generator().manual_seed(7)
    offsets = torch.arange(VOCAB) if mapped else None  # draft token i is target token 2 i
    model = dspark_model(generator, offsets, **options)
    hidden, anchors = dspark_case(generator)
    found = dspark_draft(model, hidden, anchors, Candidates(REQS * DEPTHS, VOCAB, VOCAB, DEVICE))
    lattice = lattice_of(found.scores, found.log_probs)
    drafted, confidence = vllm_draft(model, hidden, anchors)
    base = model.compute_draft_logits(hidden.flatten(0, 1)).view(REQS, DEPTHS, VOCAB)
    changed = 0
    for r in range(REQS):
        ids = found.token_ids[r].cpu()
        tokens, _ = lattice_chain(lattice[r], ids.numpy())
        assert tokens.tolist() == drafted[r].tolist()
        before = anchors[r]
        for d in range(DEPTHS):
            p = 0 if d == 0 else int((ids[d - 1] == before).nonzero())
            bias = model.markov_bias(model.markov_embed(before[None]))[0]
            expected = (base[r, d] + bias).log_softmax(-1).cpu()
            own = ids[d] if offsets is None else ids[d] // 2
            np.testing.assert_allclose(lattice[r, d, p], expected[own], atol=1e-4)
            if found.confidence is not None:
                np.testing.assert_allclose(
                    found.confidence[r, d, p].item(), confidence[r, d].item(), rtol=1e-5
                )
            before = drafted[r, d]
            changed += int(ids[d, 0] != before)
    assert changed > 3  # the condition does change the draft
    assert (found.confidence is None) == (options.get("confidence", True) is None)


@torch.inference_mode()
def test_dspark_candidates_of_the_first_position_know_the_anchor() -> None:
    generator = torch.Generator().manual_seed(8)
    model = dspark_model(generator)
    hidden, anchors = dspark_case(generator)
    found = dspark_draft(model, hidden, anchors, Candidates(REQS * DEPTHS, VOCAB, TOP_K, DEVICE))
    base = model.compute_draft_logits(hidden.flatten(0, 1)).view(REQS, DEPTHS, VOCAB)
    exact = base.clone()
    exact[:, 0] += model.markov_bias(model.markov_embed(anchors))
    values, ids = exact.log_softmax(-1).topk(TOP_K, dim=-1)
    assert torch.equal(found.token_ids, ids)
    torch.testing.assert_close(found.log_probs, values, atol=1e-5, rtol=1e-5)
    assert not torch.equal(ids[:, 0], base[:, 0].topk(TOP_K, dim=-1).indices)
    lattice = lattice_of(found.scores, found.log_probs)
    np.testing.assert_allclose(lattice[:, 0, 0], values[:, 0].cpu(), atol=1e-4)


@torch.inference_mode()
def test_dspark_transform_follows_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muse Spark (vLLM 0.33): cap and scale of base logits and bias together."""
    generator = torch.Generator().manual_seed(9)
    model = dspark_model(generator)
    hidden, anchors = dspark_case(generator)

    def transform(logits: torch.Tensor) -> torch.Tensor:
        return 2.0 * torch.tanh(logits.float() / 2.0)

    monkeypatch.setattr(
        Qwen3DSparkForCausalLM,
        "apply_output_logit_transform",
        staticmethod(transform),
        raising=False,
    )
    found = dspark_draft(model, hidden, anchors, Candidates(REQS * DEPTHS, VOCAB, VOCAB, DEVICE))
    lattice = lattice_of(found.scores, found.log_probs)
    base = model.compute_draft_logits(hidden.flatten(0, 1)).view(REQS, DEPTHS, VOCAB)
    for d, p in ((0, 0), (2, 0), (3, 5)):
        ids = found.token_ids[1]
        before = anchors[1] if d == 0 else ids[d - 1, p]
        bias = model.markov_bias(model.markov_embed(before[None]))[0]
        expected = transform(base[1, d] + bias).log_softmax(-1)[ids[d]].cpu()
        np.testing.assert_allclose(lattice[1, d, p], expected, atol=1e-4)


def test_heads_that_give_no_lattice() -> None:
    model: Any = dspark_model(torch.Generator().manual_seed(10))
    assert why_no_lattice(model) is None
    packed = torch.zeros(VOCAB, 2, dtype=torch.uint8, device=DEVICE)
    model.model.markov_head.markov_w2.weight = torch.nn.Parameter(packed, requires_grad=False)
    assert "quantised" in str(why_no_lattice(model))
    other: Any = SimpleNamespace(model=SimpleNamespace(), lm_head=None)
    assert "no Markov head" in str(why_no_lattice(other))
