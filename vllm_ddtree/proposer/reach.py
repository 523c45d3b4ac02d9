# SPDX-License-Identifier: Apache-2.0
"""The reach of a draft: how many of its positions are evaluated, 3, 7 or all.

A tree of n nodes is never deeper than n. So a draft for few nodes needs the log-probs of few
positions, and few context rows. The draft forward itself has the drafter's whole block: a drafter
may know much less with fewer masks than it was trained with. Some drafters bear fewer. A narrow
reach, of 7 masks, finds out while serving (budget/auto.py).

A step of plain decoding after which nothing is drafted has a reach of no position: only the
drafter's context follows the text, by one row a request.

A budget that changes while serving has a few reaches. What the CUDA graphs of a reach read belongs
to that reach, or is read from its beginning.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from vllm_ddtree.proposer.context import ContextRows

SHORT = (3, 7)
"""Positions of drafts shorter than the longest, ascending. Each has CUDA graphs of its own."""


NARROW = 7
"""Masks, and positions, of a narrow draft."""


def draft_reaches(depth: int, budgets: Iterable[int]) -> list[int]:
    """Positions of the drafts that an engine may make, the longest first.

    Args:
        depth: deepest node of its trees.
        budgets: nodes that it may draft, one of them above 0.

    """
    deepest = {min(depth, budget) for budget in budgets if budget > 0}
    longest = max(deepest)
    sizes = [*(size for size in SHORT if size < longest), longest]
    used = {next(size for size in sizes if size >= depth) for depth in deepest}
    return sorted(used, reverse=True)


@dataclass
class Reach:
    """What drafts of P evaluated positions need."""

    positions: int
    """P: the first masked queries of each block; their log-probs are computed."""
    context: ContextRows
    """Context of P + 1 rows a request, the longest path that such a draft may follow."""
    log_probs: torch.Tensor
    """float32 [max_num_reqs, P, top_k], contiguous."""
    token_ids: torch.Tensor
    """int64 [max_num_reqs, P, top_k], contiguous."""
    masks: int | None = None
    """Masked queries of each block; None: all that the drafter has."""

    @property
    def manager(self) -> str:
        """Name of the speculator's attribute with the graphs of this reach.

        It must be an attribute: vLLM captures graphs to estimate their memory, and then drops the
        managers that it finds among the attributes (v1/worker/gpu/cudagraph_utils.py,
        `profile_cudagraph_memory`).
        """
        narrow = "" if self.masks is None else "_narrow"
        return f"query_cudagraph_manager_{self.positions}{narrow}"


def make_reaches(
    positions: Iterable[int], max_num_reqs: int, top_k: int, device: torch.device
) -> list[Reach]:
    """Reaches that share one storage of candidates.

    Args:
        positions: of each reach, the longest first.
        max_num_reqs: most requests in a batch.
        top_k: candidates a position.
        device: where the buffers are.

    """
    positions = list(positions)
    size = max_num_reqs * positions[0] * top_k
    log_probs = torch.zeros(size, dtype=torch.float32, device=device)
    token_ids = torch.zeros(size, dtype=torch.int64, device=device)

    def first(values: torch.Tensor, reached: int) -> torch.Tensor:
        return values[: max_num_reqs * reached * top_k].view(max_num_reqs, reached, top_k)

    return [
        Reach(
            reached,
            ContextRows(max_num_reqs, reached + 1, device),
            first(log_probs, reached),
            first(token_ids, reached),
        )
        for reached in positions
    ]


def make_narrow(reaches: Iterable[Reach], block_size: int) -> Reach | None:
    """The narrow reach beside these, with the buffers of one of them.

    Args:
        reaches: of the engine.
        block_size: of the drafter.

    Returns:
        None if the drafter's block is no longer, or no reach has as many positions.

    """
    if block_size - 1 <= NARROW:
        return None
    like = next((reach for reach in reaches if reach.positions == NARROW), None)
    return None if like is None else replace(like, masks=NARROW)


def context_alone(max_num_reqs: int, device: torch.device) -> Reach:
    """The reach of no position."""
    log_probs = torch.zeros(max_num_reqs, 0, 0, dtype=torch.float32, device=device)
    return Reach(0, ContextRows(max_num_reqs, 1, device), log_probs, log_probs.long())


def fitting(reaches: list[Reach], needed: int) -> Reach:
    """The shortest reach of at least `needed` positions."""
    return next(reach for reach in reversed(reaches) if reach.positions >= needed)
