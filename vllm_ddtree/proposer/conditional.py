# SPDX-License-Identifier: Apache-2.0
"""Trees of conditional drafters: each candidate is rated given the one before.

A speculator of a conditional family is `ConditionalSpeculator` before vLLM's own speculator of that
family. vLLM's part loads the drafter, runs it and scores candidates (`scores` says where); ours
makes a lattice of the scores and grows the trees.

The heads are compiled for, or attend over, all positions of a block. So every draft has the whole
block, and only the tree's depth is limited.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from vllm_ddtree.integration import Family
from vllm_ddtree.proposer.head import make_head
from vllm_ddtree.proposer.reach import Reach
from vllm_ddtree.proposer.scores import ConditionalDraft, conditional_log_probs, head_scores
from vllm_ddtree.proposer.speculator import DDTreeSpeculator
from vllm_ddtree.round import runtime
from vllm_ddtree.tree.lattice import Rankings, build_lattice_trees

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ConditionalSpeculator(DDTreeSpeculator):
    """Grows trees over a lattice of conditional log-probs.

    With `"conditional": false` the conditions are ignored: the tree is that of the candidates'
    own log-probs, as of a plain DFlash drafter.

    Arguments as of `DDTreeSpeculator`.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, *args: Any) -> None:
        super().__init__(vllm_config, device, *args)
        rt = self.runtime
        self.rankings = Rankings(self.max_num_reqs, rt.max_depth, rt.top_k, device)

    def _positions(self, budgets: Iterable[int]) -> list[int]:
        """One reach: the head scores the whole block, however few nodes are drafted."""
        return [self.runtime.max_depth]

    def _make_narrow(self, block_size: int) -> Reach | None:
        """None: the head was made for the whole block."""
        return None

    def _family_in_words(self) -> str:
        spec = self.speculative_config
        return spec.family if spec.conditional else f"{spec.family} (conditional=false)"

    @abstractmethod
    def draft(self, num_reqs: int, hidden_states: torch.Tensor) -> ConditionalDraft:
        """Candidates of the whole block and their scores.

        Args:
            num_reqs: requests, padding included.
            hidden_states: [num_reqs, D, hidden size], of all D positions of the block.

        """

    def _grow(self, num_reqs: int, hidden_states: torch.Tensor) -> None:
        """Candidates of each position, their scores given the one before, and trees."""
        rt, steps = self.runtime, self.num_speculative_steps
        rows = self.sample_indices[: num_reqs * steps]
        draft = self.draft(num_reqs, hidden_states[rows].view(num_reqs, steps, -1))
        if not self.speculative_config.conditional:
            self.build_plain(num_reqs, draft.log_probs, draft.token_ids)
            return
        conditional_log_probs(draft.scores, draft.log_probs, draft.scores, draft.confidence)
        build_lattice_trees(
            draft.scores,
            draft.token_ids,
            self.batch_indices(num_reqs),
            rt.trees,
            self.tree_tokens[:num_reqs],
            self.reach.positions,
            self.rankings,
            rt.meter.built,
        )

    def _top_k(
        self, num_reqs: int, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each position's candidates by themselves.

        Args:
            num_reqs: requests, padding included.
            hidden_states: [num_reqs, D, hidden size].

        Returns:
            float32 and int64 [num_reqs, D, top_k], log-probs and token ids.

        """
        steps, top_k = self.num_speculative_steps, self.runtime.top_k
        if self.head is None:
            self.head = make_head(self.model, self.max_num_reqs * steps, top_k, self.device)
        shape = (num_reqs, steps, top_k)
        log_probs = torch.empty(shape, dtype=torch.float32, device=self.device)
        token_ids = torch.empty(shape, dtype=torch.int64, device=self.device)
        self.head.top_k(
            hidden_states.flatten(0, 1), log_probs.flatten(0, 1), token_ids.flatten(0, 1)
        )
        return log_probs, token_ids

    def score(self, num_reqs: int, hidden_states: torch.Tensor) -> ConditionalDraft:
        """The draft of a drafter with a candidate head; arguments as of `draft`."""
        log_probs, token_ids = self._top_k(num_reqs, hidden_states)
        scores = head_scores(self, token_ids, log_probs, hidden_states)
        return ConditionalDraft(scores.float().contiguous(), log_probs, token_ids, None)


def make_speculator(
    vllm_config: VllmConfig,
    device: torch.device,
    check_loaded: Callable[[VllmConfig, torch.nn.Module], None],
) -> DDTreeSpeculator:
    """The speculator of a runner, before any weight is loaded.

    Args:
        vllm_config: the runner's.
        device: the runner's.
        check_loaded: (VllmConfig, drafter) -> None; raises for a loaded drafter that cannot draft.

    """
    rt = runtime.create(vllm_config, device)
    speculator = _speculator_class(Family(vllm_config.speculative_config.family))
    return speculator(vllm_config, device, rt, check_loaded)


def _speculator_class(family: Family) -> type[DDTreeSpeculator]:
    """The speculator of a family; imported here, for other families' imports are heavy."""
    if family is Family.DFLASH2:
        from vllm_ddtree.proposer.dflash2 import DDTreeDFlash2

        return DDTreeDFlash2
    if family is Family.LILICORR:
        from vllm_ddtree.proposer.lilicorr import DDTreeLiLiCorr

        return DDTreeLiLiCorr
    if family is Family.DSPARK:
        from vllm_ddtree.proposer.dspark import DDTreeDSpark

        return DDTreeDSpark
    return DDTreeSpeculator
