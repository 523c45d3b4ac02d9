# SPDX-License-Identifier: Apache-2.0
"""Rounds of speculative decoding along a known continuation (DDTree, arXiv 2604.12989).

Lossless decoding emits the target's own tokens, so a request's output is known without speculation
and decides every round: the accepted path is the longest one in the tree that spells the output.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vllm_ddtree.tree.reference import Tree, accepted_path, build_tree

from .dflash import Drafter
from .qwen3 import Target


@dataclass(frozen=True)
class Round:
    """One verify step.

    Attributes:
        position: the root's (anchor's) position in prompt + output, 0-based.
        accepted: accepted nodes, before any trimming, as vLLM's counters have it.
        emitted: tokens that the request keeps of accepted + bonus: fewer than accepted + 1 only
            where `max_tokens`, `max_model_len` or a stop token cuts the last round.
        num_nodes: nodes that were verified. 0: a plain decode step next to the length limit, which
            vLLM does not count as a draft.
        tokens, parents: the verified rows; row 0 is the root.
        complete: False where the known continuation ended inside the tree, so that `accepted` is
            only a lower bound.
    """

    position: int
    accepted: int
    emitted: int
    num_nodes: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    complete: bool


def acceptance_length(rounds: Sequence[Round]) -> float:
    """Mean of accepted + 1 over the rounds that had a tree, as vLLM reports it."""
    drafted = [r.accepted + 1 for r in rounds if r.num_nodes]
    return sum(drafted) / len(drafted)


def candidates(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` best tokens of each draft position.

    Args:
        logits: float32 [D, vocab].

    Returns:
        log-probs float32 [D, K] over the full vocabulary, and token ids int64 [D, K]; best first,
        equal logits by smaller id.
    """
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    log_probs = values[:, :top_k] - logits.logsumexp(-1, keepdim=True)
    return log_probs, ids[:, :top_k]


class Trace:
    """One request with its known continuation, ready for replays with any tree.

    One target pass gives the states of all positions, and the drafter's context rows with them.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """output_ids: the target's own continuation, greedy or sampled, at least one token."""
        if not prompt_ids or not output_ids:
            raise ValueError("a trace needs a prompt and a continuation")
        self.drafter = drafter
        self.num_prompt_tokens = len(prompt_ids)
        self.tokens = [*prompt_ids, *output_ids]
        _, states, _ = target.forward(self.tokens)
        self.context = drafter.context(states)
        self._logits: dict[tuple[int, int, int | None], Tensor] = {}

    def draft(self, position: int, num_masks: int | None, max_model_len: int | None) -> Tensor:
        """Drafter logits float32 [num_masks, vocab] after the anchor at `position`, kept."""
        num_masks = self.drafter.block_size - 1 if num_masks is None else num_masks
        max_model_len = self._limit(position, max_model_len, num_masks)
        key = (position, num_masks, max_model_len)
        if key not in self._logits:
            self._logits[key] = self.drafter.draft(
                self.context,
                self.tokens[position],
                position,
                num_masks=num_masks,
                max_model_len=max_model_len,
            )
        return self._logits[key]

    def _limit(
        self, position: int, max_model_len: int | None, num_masks: int | None = None
    ) -> int | None:
        """The length limit, None where a draft does not reach it and is as without one."""
        num_masks = self.drafter.block_size - 1 if num_masks is None else num_masks
        if max_model_len is not None and position + 1 + num_masks <= max_model_len:
            return None
        return max_model_len

    def grow(
        self,
        position: int,
        budget: int,
        top_k: int,
        depth: int | None,
        chain: bool,
        num_masks: int,
        max_model_len: int | None,
    ) -> Tree:
        """The tree whose root is at `position`; arguments as of `round`."""
        log_probs, ids = candidates(self.draft(position, num_masks, max_model_len), top_k)
        return build_tree(log_probs.numpy(), ids.numpy(), budget, depth, chain)

    def round(
        self,
        position: int,
        end: int,
        *,
        budget: int,
        top_k: int,
        depth: int | None = None,
        chain: bool = False,
        max_model_len: int | None = None,
        num_masks: int | None = None,
    ) -> Round:
        """The round whose root is at `position`, of a request that ends before `end`.

        Args:
            budget: nodes without the root.
            top_k: candidates a draft position.
            depth: the tree's depth limit; None: block_size - 1.
            chain: whether to grow the chain alone, the drafter's best token at each depth.
            max_model_len: the engine's length limit: trees shrink near it.
            num_masks: draft queries after the anchor; None: block_size - 1. vLLM's own method
                "dflash" has `num_speculative_tokens` of them.

        """
        if num_masks is None:
            num_masks = self.drafter.block_size - 1
        tree = self.grow(position, budget, top_k, depth, chain, num_masks, max_model_len)
        tokens = [self.tokens[position], *(int(t) for t in tree.tokens[1:])]
        parents = [int(p) for p in tree.parents]
        depths = [int(d) for d in tree.depths]
        num_nodes = len(parents) - 1
        if max_model_len is not None:
            # vLLM's scheduler: no row beyond max_model_len - 2, the last rows go.
            num_nodes = min(num_nodes, max_model_len - 2 - position)
        # Only rows on the true path are ever looked at: the choice there is the true token.
        # Rows beyond `num_nodes` are not verified; -1 is nobody's token.
        choices = [
            self.tokens[position + 1 + d] if position + 1 + d < len(self.tokens) else -1
            for d in depths
        ]
        rows, _ = accepted_path(tree, np.array(choices))
        accepted = sum(0 < row <= num_nodes for row in rows)
        return Round(
            position=position,
            accepted=accepted,
            emitted=min(accepted + 1, end - position - 1),
            num_nodes=num_nodes,
            tokens=tuple(tokens[: num_nodes + 1]),
            parents=tuple(parents[: num_nodes + 1]),
            complete=position + 1 + accepted < len(self.tokens),
        )

    def replay(
        self,
        *,
        max_tokens: int | None = None,
        max_model_len: int | None = None,
        stop_token_ids: Collection[int] = (),
        **how: Any,
    ) -> list[Round]:
        """The engine's rounds for this request.

        Args:
            max_tokens: where the request ends; None: with the known output. Known beyond it (and
                beyond a stop token) by the block size, the output makes the last round's `accepted`
                exact too.
            max_model_len: the engine's length limit.
            stop_token_ids: a request ends with the first of these.
            how: they are drafted: the other arguments of `round`.

        Returns:
            The rounds in order; 1 + the sum of their `emitted` is the number of output tokens.

        Raises:
            ValueError: max_tokens is more than is known.

        """
        known = len(self.tokens) - self.num_prompt_tokens
        max_tokens = known if max_tokens is None else max_tokens
        if max_tokens > known:
            raise ValueError(f"max_tokens {max_tokens}, but only {known} output tokens are known")
        end = self.num_prompt_tokens + max_tokens
        if max_model_len is not None:
            end = min(end, max_model_len)
        for i in range(self.num_prompt_tokens, end):
            if self.tokens[i] in stop_token_ids:
                end = i + 1
                break
        rounds: list[Round] = []
        # The prompt's last row gave the first output token without a tree: the first root.
        position = self.num_prompt_tokens
        while position + 1 < end:
            found = self.round(position, end, max_model_len=max_model_len, **how)
            rounds.append(found)
            position += found.emitted
        return rounds
