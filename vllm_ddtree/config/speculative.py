# SPDX-License-Identifier: Apache-2.0
"""The speculative configuration of `method: ddtree`.

Toward vLLM a `DDTreeConfig` is a DFlash or DSpark draft whose `num_speculative_tokens` is the
budget: scheduler, decode query length, request buffers and graph sizes follow from that one number.
The draft's own numbers (block size, depth, candidates) stand beside it and are used by the proposer
only.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from pydantic import Field, ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_ddtree import presence
from vllm_ddtree.config.drafter import check_drafter, root_drafts
from vllm_ddtree.config.errors import bad_key, refused_by_vllm
from vllm_ddtree.config.family import family_of, fixed_top_k
from vllm_ddtree.config.keys import DEFAULT_TOP_K, MAX_BUDGET, MAX_TOP_K, Keys, parse
from vllm_ddtree.config.pair import draft_vocab_size, set_draft_positions
from vllm_ddtree.integration import Family

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig

_LISTENERS = "presence_listeners"
"""Key of the pickled state."""


@functools.cache
def _counts_draft_slots() -> bool:
    """Whether this vLLM keeps slots free for the drafts of a step: 0.32 does, 0.33 does not."""
    chain = object.__new__(SpeculativeConfig)
    vars(chain).update(method="dflash", num_speculative_tokens=1)
    return chain.max_num_new_slots_for_drafting > 0


@config
class DDTreeConfig(SpeculativeConfig):
    """A `SpeculativeConfig` with DDTree's keys (budget in nodes, depth and block size in
    tokens)."""

    budget: int = Field(default=1, ge=1, le=MAX_BUDGET)
    """Nodes of the tree, the root not counted."""
    top_k: int = Field(default=DEFAULT_TOP_K, ge=1, le=MAX_TOP_K)
    """Candidates a draft position."""
    depth_limit: int = Field(default=1, ge=1)
    """Depth limit of the tree: the user's `num_speculative_tokens`."""
    auto_budget: bool = False
    """Whether the scheduler chooses the budget by measured cost and observed acceptance."""
    mean_budget: int | None = Field(default=None, ge=1)
    """Nodes of a tree on average, which running requests share; None: each has its own."""
    block_size: int = Field(default=2, ge=2)
    """Query tokens of the draft forward (anchor and masks), from the drafter's config."""
    draft_positions: int = Field(default=1, ge=1)
    """Tokens that the draft forward drafts: the masks, and the anchor where it drafts, too."""
    family: str = Family.DFLASH.value
    """The drafter's family, a value of `Family`."""
    conditional: bool = True
    """Whether candidates are rated given the one before, where the family does that."""

    @property
    def max_depth(self) -> int:
        """Deepest node that a tree can have: a tree of n nodes is at most n deep."""
        return min(self.depth_limit, self.budget)

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Draft queries a request beyond the one vLLM counts; independent of the budget."""
        return self.block_size - 1 if _counts_draft_slots() else 0

    def __repr__(self) -> str:
        budget = "auto" if self.auto_budget else str(self.budget)
        if self.mean_budget is not None:
            budget += f" (mean {self.mean_budget})"
        return (
            f"SpeculativeConfig(method='ddtree', model={self.draft_model_config.model!r}, "
            f"family={self.family}, budget={budget}, depth={self.depth_limit}, "
            f"top_k={self.top_k}, block_size={self.block_size})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, _LISTENERS: presence.listeners()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickled in an engine or worker process, maybe before the plugin is registered there.
        own = dict(state)
        for listener in own.pop(_LISTENERS):
            presence.when_present(listener)
        self.__dict__.update(own)
        presence.announce()


def make_config(
    given: dict[Any, Any], target_model: ModelConfig, target_parallel: ParallelConfig
) -> DDTreeConfig:
    """A DDTreeConfig from the user's keys.

    Args:
        given: the speculative_config as the user wrote it.
        target_model: the target's.
        target_parallel: the target's.

    Raises:
        ValueError: one line naming the key, its value and the fix.

    """
    keys = parse(given)
    family = family_of(keys.model, keys.for_vllm.get("revision"))
    try:
        built = DDTreeConfig(
            method=family.method,
            num_speculative_tokens=keys.budget,
            budget=keys.budget,
            num_speculative_tokens_per_batch_size=keys.schedule,
            auto_budget=keys.auto_budget,
            mean_budget=keys.mean_budget,
            family=family.value,
            conditional=keys.conditional,
            target_model_config=target_model,
            target_parallel_config=target_parallel,
            **keys.for_vllm,
        )
    except (ValidationError, StrictDataclassError, OSError, KeyError) as error:
        raise refused_by_vllm(error, keys.for_vllm) from error
    built.block_size = check_drafter(built, family, keys.num_speculative_tokens)
    built.draft_positions = built.block_size - (not root_drafts(built, family))
    set_draft_positions(built)
    built.depth_limit = keys.depth_limit(built.draft_positions, built.block_size)
    built.top_k = _top_k(keys, built, family)
    presence.announce()
    return built


def _top_k(keys: Keys, built: DDTreeConfig, family: Family) -> int:
    """Candidates a draft position."""
    draft = built.draft_model_config
    fixed = fixed_top_k(draft.model, draft.hf_config, family)
    if fixed is not None:
        if keys.top_k not in (None, fixed):
            what = f"the drafter's {family.candidates_key}, for which its head was made"
            raise bad_key("top_k", keys.top_k, f"leave it out, or give {fixed}, {what}")
        return fixed
    top_k = min(keys.top_k or DEFAULT_TOP_K, draft_vocab_size(draft.hf_config))
    # Where a node's rank is that of its depth, it is among the budget best only below the budget.
    return min(top_k, keys.budget) if family is Family.DFLASH else top_k
