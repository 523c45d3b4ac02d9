# SPDX-License-Identifier: Apache-2.0
"""The draft head in shards, of vLLM's own layers, gives what the same head gives on one rank.

Ranks run one after another: once to see what each of them gathers, once with what all have.
Weights and states are small whole numbers, so sums are exact and ties abound.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

from vllm_ddtree.proposer import head as draft_head
from vllm_ddtree.proposer.head import ShardedHead, WholeHead, make_head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, ROWS, TOP_K = 8, 5, 12


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


class Ranks:
    """Stands for vLLM's tensor-parallel group: `rank` of `size`, and what all ranks gather."""

    def __init__(self, patch: pytest.MonkeyPatch, size: int) -> None:
        self.rank, self.size = 0, size
        self.sent: list[torch.Tensor] = []
        for module in (vocab_parallel_embedding, draft_head):
            patch.setattr(module, "get_tensor_model_parallel_rank", lambda: self.rank)
            patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: self.size)
        patch.setattr(draft_head, "tensor_model_parallel_all_gather", self.all_gather)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0
        if len(self.sent) < self.size:
            self.sent.append(tensor.clone())
            return torch.cat([tensor] * self.size)
        return torch.cat(self.sent)


def drafter(vocab: int, offsets: torch.Tensor | None = None, **processor: Any) -> Any:
    """What `DFlashQwen3ForCausalLM.compute_logits` reads, with this rank's part of the weights."""
    model = DFlashQwen3ForCausalLM.__new__(DFlashQwen3ForCausalLM)
    torch.nn.Module.__init__(model)
    generator = torch.Generator().manual_seed(vocab)
    weight = torch.randint(-2, 3, (vocab, HIDDEN), generator=generator).float().to(DEVICE)
    with torch.device(DEVICE):
        model.lm_head = ParallelLMHead(vocab, HIDDEN)
    model.lm_head.weight_loader(model.lm_head.weight, weight)
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    model.logits_processor = LogitsProcessor(vocab, **processor)
    model.draft_id_to_target_id = offsets
    last = 0 if offsets is None else int(offsets.max())
    model.config = SimpleNamespace(draft_vocab_size=vocab, vocab_size=vocab + last)
    return model


def run(head: Any) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-2, 3, (ROWS, HIDDEN), generator=generator).float().to(DEVICE)
    log_probs = torch.full((ROWS, TOP_K), 7.0, device=DEVICE)
    ids = torch.full((ROWS, TOP_K), -9, device=DEVICE)
    head.top_k(hidden, log_probs, ids)
    return log_probs, ids


@pytest.mark.parametrize(
    ("size", "vocab", "own", "processor"),
    [
        (2, 300, False, {}),
        (2, 300, True, {}),
        (3, 150, True, {"scale": 0.5}),
        (4, 70, False, {"scale": -2.0, "soft_cap": 8.0}),  # the last rank has padding alone
    ],
)
def test_as_on_one_rank(
    size: int,
    vocab: int,
    own: bool,
    processor: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the same bits on all ranks. `own`: a vocabulary with gaps, counted from the target's."""
    offsets = (torch.arange(vocab, device=DEVICE) // 3 + 5) if own else None
    ranks = Ranks(monkeypatch, 1)
    model = drafter(vocab, offsets, **processor)
    whole = make_head(model, ROWS, TOP_K, DEVICE)
    assert isinstance(whole, WholeHead)
    wanted, wanted_ids = run(whole)
    assert any(len(set(row)) < TOP_K for row in wanted.tolist()), "no ties"
    assert ranks.sent == []

    ranks.size = size
    heads = []
    for ranks.rank in range(size):
        heads.append(make_head(drafter(vocab, offsets, **processor), ROWS, TOP_K, DEVICE))
        assert isinstance(heads[-1], ShardedHead)
        run(heads[-1])
    assert [part.nbytes for part in ranks.sent] == [ROWS * (TOP_K + 1) * 8] * size
    results = [run(head) for head in heads]
    for log_probs, ids in results:
        assert torch.equal(ids, wanted_ids)
        torch.testing.assert_close(log_probs, wanted, rtol=2e-7, atol=1e-6)
        assert torch.equal(log_probs, results[0][0])


class OtherLogits(DFlashQwen3ForCausalLM):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return super().compute_logits(hidden_states)


class OtherProcessor(LogitsProcessor):
    pass


def _other_class(model: Any) -> None:
    model.__class__ = OtherLogits


def _other_processor(model: Any) -> None:
    model.logits_processor = OtherProcessor(300)


def _other_head(model: Any) -> None:
    model.lm_head = torch.nn.Linear(HIDDEN, 300)


def _replicated(model: Any) -> None:
    model.lm_head = ParallelLMHead(300, HIDDEN, disable_tp=True)


def _unordered(model: Any) -> None:
    model.draft_id_to_target_id = torch.arange(300).flip(0)


def _ordered(model: Any) -> None:
    model.draft_id_to_target_id = torch.arange(300)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_ordered, None),
        (_other_class, "OtherLogits computes its logits in a way of its own"),
        (_other_processor, "its logits pass a OtherProcessor"),
        (_other_head, "its head is a Linear"),
        (_replicated, "its head is not spread over the ranks"),
        (_unordered, "its vocabulary is not in the order of the target's"),
    ],
)
def test_what_cannot_be_taken_apart(
    change: Any, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ranks(monkeypatch, 2)
    said: list[str] = []
    monkeypatch.setattr(draft_head.logger, "debug", lambda text, *args: said.append(text % args))
    model = drafter(300)
    change(model)
    head = make_head(model, ROWS, TOP_K, DEVICE)
    assert isinstance(head, WholeHead if why else ShardedHead)
    assert len(said) == 1 and said[0].endswith(why or "its own shard of the vocabulary")


def test_more_candidates_than_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    Ranks(monkeypatch, 2)
    with pytest.raises(ValueError, match="top_k=12"):
        make_head(drafter(11), ROWS, TOP_K, DEVICE)
