# SPDX-License-Identifier: Apache-2.0
"""The draft head: from hidden states to the candidates of each draft position.

There are two heads; one is chosen at start. `WholeHead` asks the drafter for its logits, which vLLM
gathers from all tensor-parallel ranks. `ShardedHead` leaves every rank the logits of its own shard
of the vocabulary, and gathers k candidates a rank.
"""

from typing import Any, Protocol

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

from vllm_ddtree.proposer.candidates import Candidates, top_k_keys, top_k_log_probs
from vllm_ddtree.proposer.logits import (
    has_candidates,
    logits_processor,
    shard_logits,
    whole_logits,
)
from vllm_ddtree.proposer.shards import merge_shards

logger = init_logger("vllm.ddtree")


class Head(Protocol):
    """What the proposer asks of a draft head."""

    def top_k(
        self, hidden_states: torch.Tensor, out_log_probs: torch.Tensor, out_ids: torch.Tensor
    ) -> None:
        """Write the best tokens of each row and their log-probs over the whole vocabulary.

        Order and layout are those of `top_k_log_probs`. Can be captured in a graph.

        Args:
            hidden_states: [M, hidden size], the drafter's.
            out_log_probs: float32 [M, k], out.
            out_ids: int64 [M, k], out, the target's token ids.

        """


class WholeHead:
    """Every rank finds the candidates in the logits of the whole vocabulary.

    Args:
        model: the drafter.
        max_rows: most draft positions in one call.
        top_k: candidates a position.

    """

    def __init__(self, model: Any, max_rows: int, top_k: int) -> None:
        self.model, self.max_rows, self.num_candidates = model, max_rows, top_k
        # Made by the first (profiling) run, which shows the size of the drafter's vocabulary.
        self.candidates: Candidates | None = None

    def top_k(
        self, hidden_states: torch.Tensor, out_log_probs: torch.Tensor, out_ids: torch.Tensor
    ) -> None:
        """As in `Head`."""
        logits = whole_logits(self.model, hidden_states)
        if self.candidates is None:
            self.candidates = Candidates(
                self.max_rows, logits.shape[1], self.num_candidates, logits.device
            )
        top_k_log_probs(logits, out_log_probs, out_ids, self.candidates)


class ShardedHead:
    """Every rank finds the candidates of its shard; all ranks merge those of all.

    The shard's columns are those that `DFlashQwen3ForCausalLM.compute_logits` would gather from
    this rank and keep, and they have the ids that they get there (vLLM models/qwen3_dflash.py and
    layers/logits_processor.py). A row may have fewer than k candidates above -inf. `WholeHead` then
    fills up with any token of the target, this head with tokens of the draft vocabulary; neither
    becomes a node.

    Args:
        model: the drafter.
        max_rows: most draft positions in one call.
        top_k: candidates a position.
        device: where the logits are.
        draft_ids: whether the ids are those of the draft vocabulary, not the target's.

    Raises:
        ValueError: the vocabulary has fewer than `top_k` tokens.

    """

    def __init__(
        self,
        model: DFlashQwen3ForCausalLM,
        max_rows: int,
        top_k: int,
        device: torch.device | str,
        draft_ids: bool = False,
    ) -> None:
        self.model, self.num_shards = model, model.lm_head.tp_size
        vocab = logits_processor(model).org_vocab_size
        shard = model.lm_head.num_embeddings_per_partition
        if top_k > vocab:
            raise ValueError(f"the draft vocabulary has {vocab} tokens, fewer than top_k={top_k}")
        # Without what vLLM pads; the last ranks may have nothing else.
        first = min(model.lm_head.tp_rank * shard, vocab)
        last = min(first + shard, vocab)
        self.shard = slice(first, last)
        ids = torch.arange(vocab) if draft_ids else _target_ids(model, vocab)
        ids = ids[self.shard].to(device, torch.int32)
        self.candidates = Candidates(max_rows, last - first, top_k, device, ids)
        self.keys = torch.zeros(max_rows, top_k + 1, dtype=torch.int64, device=device)

    def top_k(
        self,
        hidden_states: torch.Tensor,
        out_log_probs: torch.Tensor,
        out_ids: torch.Tensor,
        first_bias: torch.Tensor | None = None,
    ) -> None:
        """As in `Head`; the same bits on every rank.

        Args:
            hidden_states: as in `Head`.
            out_log_probs: as in `Head`.
            out_ids: as in `Head`.
            first_bias: [R, V], added to the logits of the first of each request's positions, V the
                whole draft vocabulary.

        """
        keys = self.keys[: hidden_states.shape[0]]
        logits = shard_logits(self.model, hidden_states)[:, : self.candidates.vocab]
        if first_bias is not None:
            logits[:: len(keys) // len(first_bias)] += first_bias[:, self.shard]
        top_k_keys(logits, keys, self.candidates)
        # As float32: vLLM's shared-memory gather on the CPU takes no integers. Bits are copied.
        gathered = tensor_model_parallel_all_gather(keys.view(torch.float32), dim=0)
        merge_shards(
            gathered.view(torch.int64).view(self.num_shards, *keys.shape), out_log_probs, out_ids
        )


def make_head(model: Any, max_rows: int, top_k: int, device: torch.device | str) -> Head:
    """The head that fits a loaded drafter; the same on every rank.

    Args:
        model: the drafter.
        max_rows: most draft positions in one call.
        top_k: candidates a position.
        device: where the logits are.

    """
    why = why_whole(model)
    if why is None:
        logger.debug("ddtree: each rank drafts from its own shard of the vocabulary")
        return ShardedHead(model, max_rows, top_k, device)
    logger.debug("ddtree: each rank drafts from the whole vocabulary's logits: %s", why)
    return WholeHead(model, max_rows, top_k)


def why_whole(model: Any, draft_ids: bool = False) -> str | None:
    """Why the drafter's head cannot be taken apart, None if it can.

    Args:
        model: the drafter.
        draft_ids: whether ids of the draft vocabulary are asked for.

    """
    ranks = get_tensor_model_parallel_world_size()
    if ranks == 1:
        return "there is one rank"
    if not has_candidates(model) and (
        type(model).compute_logits is not DFlashQwen3ForCausalLM.compute_logits
    ):
        return f"{type(model).__name__} computes its logits in a way of its own"
    if hasattr(model, "apply_output_logit_transform"):  # vLLM 0.33, Muse Spark
        return "its logits are changed after all is added"
    if type(logits_processor(model)) is not LogitsProcessor:
        return f"its logits pass a {type(logits_processor(model)).__name__}"
    head = model.lm_head
    if not isinstance(head, VocabParallelEmbedding):
        return f"its head is a {type(head).__name__}"
    if (head.tp_rank, head.tp_size) != (get_tensor_model_parallel_rank(), ranks):
        return "its head is not spread over the ranks"
    if draft_ids:
        return None
    ids = _target_ids(model, logits_processor(model).org_vocab_size)
    if not bool((ids[1:] > ids[:-1]).all()):
        return "its vocabulary is not in the order of the target's"
    return None


def _target_ids(model: DFlashQwen3ForCausalLM, vocab: int) -> torch.Tensor:
    """int64 [vocab]: the target's id of each token of the draft vocabulary."""
    offsets = getattr(model, "draft_id_to_target_id", None)
    ids = torch.arange(vocab, device=None if offsets is None else offsets.device)
    return ids if offsets is None else ids + offsets
