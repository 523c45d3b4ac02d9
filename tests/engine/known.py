# SPDX-License-Identifier: Apache-2.0
"""A drafter whose candidates are known: what the target will say, at ranks that a test chooses.

with known_drafts(llm, sequences, plan): generate(llm, ...)

The drafter itself runs as ever; only its candidates are replaced, before trees are built from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from vllm import LLM

# (index of a draft position in its sequence) -> rank of the right token there, None: it is missing
Plan = Callable[[int], "int | None"]


def on_chain(_: int) -> int:
    """Every token first: a round accepts the whole depth, in the rows' own order."""
    return 0


def sibling(position: int) -> int:
    """The right token is second at every fourth position: paths skip rows."""
    return int(position % 4 == 0)


def now_and_then(position: int) -> int | None:
    """Stretches without the right token between stretches with it."""
    return None if position // 3 % 2 else sibling(position)


class Known:
    """`build_trees` with candidates from known sequences.

    Args:
        runner: the engine's model runner, for the tokens that its requests have.
        sequences: token ids of prompt and continuation.
        plan: where the right tokens stand.

    """

    def __init__(self, runner: Any, sequences: Sequence[Sequence[int]], plan: Plan) -> None:
        from vllm_ddtree.proposer import speculator

        self.states = runner.req_states
        self.sequences = [list(s) for s in sequences]
        self.plan = plan
        self.build_trees = speculator.build_trees

    def __call__(
        self,
        log_probs: torch.Tensor,  # [num_reqs, depth, top_k]
        token_ids: torch.Tensor,  # [num_reqs, depth, top_k]
        indices: torch.Tensor,  # [num_reqs]
        *args: Any,
    ) -> None:
        vocab = self.states.vocab_size
        for i, index in enumerate(indices.tolist()):
            if index >= 0:
                length = int(self.states.total_len.gpu[index])
                tokens = self.states.all_token_ids.gpu[index, :length].tolist()
                known = next((s for s in self.sequences if s[:length] == tokens), tokens)
                for d in range(token_ids.shape[1]):
                    row, scores = self._candidates(known, length + d, token_ids.shape[2], vocab)
                    token_ids[i, d] = torch.tensor(row)
                    log_probs[i, d] = torch.tensor(scores)
        self.build_trees(log_probs, token_ids, indices, *args)

    def _candidates(
        self, known: list[int], position: int, top_k: int, vocab: int
    ) -> tuple[list[int], list[float]]:
        right = known[position] if position < len(known) else 0
        rank = self.plan(position)
        row = [(right + 1 + k) % vocab for k in range(top_k)]
        if rank is not None:
            row[rank] = right
        # A second candidate that is right is nearly as likely as the first: both get a branch.
        best = [-0.01, -6.0] if not rank else [-0.7, -0.71]
        return row, [*best, *(-8.0 - k for k in range(top_k - 2))]


def model_runner(llm: LLM) -> Any:
    """The model runner of an engine in this process."""
    return llm.collective_rpc(lambda worker: worker.model_runner)[0]


@contextmanager
def known_drafts(llm: LLM, sequences: Sequence[Sequence[int]], plan: Plan) -> Iterator[Known]:
    """Within, the engine's drafts come from `sequences` (prompt and continuation) by `plan`."""
    from vllm_ddtree.proposer import speculator

    known = Known(model_runner(llm), sequences, plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "build_trees", known)
        yield known
