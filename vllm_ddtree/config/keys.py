# SPDX-License-Identifier: Apache-2.0
"""The keys of a speculative_config with `method: ddtree`, as the user gives them."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, TypeGuard

from vllm.config.speculative import SpeculativeConfig

from vllm_ddtree import integration
from vllm_ddtree.budget.tiers import SCHEDULE
from vllm_ddtree.config.errors import bad_key

MAX_BUDGET = 255
MAX_TOP_K = 64
DEFAULT_TOP_K = 16

OWN_KEYS = (
    "budget",
    "budget_per_batch_size",
    "mean_budget",
    "top_k",
    "num_speculative_tokens",
    "conditional",
)
"""Keys of DDTree's own."""
DFLASH_KEYS = (
    "method",
    "model",
    "draft_tensor_parallel_size",
    "quantization",
    "moe_backend",
    "attention_backend",
    "kv_cache_dtype",
    "max_model_len",
    "revision",
    "code_revision",
    "draft_load_config",
    "enforce_eager",
    "disable_eagle_block_drop",
    "disable_lookahead_block_hashes",
)
"""Keys of `method: dflash` that keep their meaning."""
FIXED_KEYS: dict[str, tuple[Any, str]] = {
    "draft_sample_method": (
        "greedy",
        "the tree is built from the drafter's log-probs, not sampled",
    ),
    "rejection_sample_method": ("standard", "the tree is verified by sample-and-follow"),
    "use_local_argmax_reduction": (False, "the tree needs log-probs, not the argmax alone"),
    "enable_adaptive_verification": (False, "it verifies a prefix of a chain"),
    "disable_padded_drafter_batch": (False, "the draft block has one length"),
    "parallel_drafting": (True, "DFlash always drafts in parallel"),
}
"""Keys of `method: dflash` that DDTree takes at one value only: key -> (value, reason)."""
OTHER_KEYS = {
    "num_speculative_tokens_per_batch_size": "use budget_per_batch_size, in nodes",
    "tensor_parallel_size": "use draft_tensor_parallel_size",
    "speculative_token_tree": (
        "leave it out: every round makes its own tree; budget sets the number of nodes"
    ),
}
"""Keys of other methods, or of other releases of vLLM, and what to use here."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """What the user asked for, checked as far as the keys alone tell."""

    model: str
    """The drafter's folder or hub name."""
    budget: int
    """Nodes of the largest tree."""
    schedule: list[tuple[int, int, int]] | None
    """(first, last, budget) for ranges of running requests."""
    auto_budget: bool
    mean_budget: int | None
    """Nodes of a tree on average, which running requests share; None: each has its own."""
    top_k: int | None
    """Candidates a draft position, None: not given."""
    conditional: bool
    """Whether candidates are rated given the one before, where the drafter can do that."""
    num_speculative_tokens: Any
    """As given; `depth_limit` reads it, once the drafter is known."""
    for_vllm: dict[str, Any]
    """The keys that vLLM reads, `method` left out."""

    def depth_limit(self, most: int, block_size: int) -> int:
        """Deepest node that the user allows; None given: as deep as the drafter's block.

        Args:
            most: tokens that the drafter drafts.
            block_size: of the drafter.

        Raises:
            ValueError: it is no depth of this drafter.

        """
        name = "block_size" if most == block_size else "block_size - 1"
        also = f", the drafter's {name}: it limits the depth, budget sets the number of nodes"
        key, value = "num_speculative_tokens", self.num_speculative_tokens
        return most if value is None else whole(key, value, 1, most, also)


def parse(given: dict[Any, Any]) -> Keys:
    """Read the user's keys.

    Raises:
        ValueError: one line with the key, its value and the fix.

    """
    keys = _spell(given)
    check_keys(keys)
    schedule = _schedule(keys.get("budget_per_batch_size"))
    auto, budget = _budget(keys.get("budget"), schedule)
    if auto:
        schedule = SCHEDULE
    if budget is None:
        assert schedule is not None
        budget = max(nodes for _, _, nodes in schedule)
    top_k = keys.get("top_k")
    top_k = None if top_k is None else whole("top_k", top_k, 1, MAX_TOP_K)
    conditional = keys.get("conditional")
    if not isinstance(conditional, (bool, type(None))):
        raise bad_key("conditional", conditional, "give true or false")
    model = keys.get("model")
    if not isinstance(model, str) or not model:
        raise bad_key("model", model, "give the DFlash drafter's folder or hub name")
    return Keys(
        model=model,
        budget=budget,
        schedule=schedule,
        auto_budget=auto,
        mean_budget=_mean_budget(keys.get("mean_budget"), keys.get("budget")),
        top_k=top_k,
        conditional=conditional is not False,
        num_speculative_tokens=keys.get("num_speculative_tokens"),
        for_vllm={k: v for k, v in keys.items() if k in DFLASH_KEYS and k != "method"},
    )


def _spell(given: dict[Any, Any]) -> dict[str, Any]:
    """The user's keys with underscores for hyphens, each given once."""
    keys: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise bad_key(key, value, "a key is a name")
        name = key.replace("-", "_")
        if name in keys:
            raise bad_key(name, value, f"it is given twice, also as {keys[name]!r}")
        keys[name] = value
    return keys


def check_keys(keys: dict[str, Any]) -> None:
    """Raise ValueError for a key that DDTree does not take."""
    present = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    dflash = [key for key in DFLASH_KEYS if key in present]
    known = (*OWN_KEYS, *DFLASH_KEYS, *FIXED_KEYS)
    for key, value in keys.items():
        if key in FIXED_KEYS:
            allowed, reason = FIXED_KEYS[key]
            if value is not None and value != allowed:
                raise bad_key(key, value, f"leave it out or give {allowed!r} ({reason})")
        elif key in OTHER_KEYS:
            raise bad_key(key, value, OTHER_KEYS[key])
        elif key not in known:
            near = difflib.get_close_matches(key, known, 1)
            names = ", ".join((*OWN_KEYS, *dflash))
            hint = f"did you mean {near[0]!r}?" if near else f"its keys are {names}"
            raise bad_key(key, value, f"there is no such key; {hint}")
        elif key in DFLASH_KEYS and key not in dflash:
            raise bad_key(
                key, value, f"vLLM {integration.vllm_version()} has no such key; leave it out"
            )


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(key: str, value: Any, low: int, high: int, also: str = "") -> int:
    """The value, a whole number from low to high; `also` ends the error."""
    if not is_whole(value) or not low <= value <= high:
        raise bad_key(key, value, f"give a whole number from {low} to {high}{also}")
    return value


def _budget(value: Any, schedule: list[tuple[int, int, int]] | None) -> tuple[bool, int | None]:
    """`budget`: whether it is auto, and the number, if one was given."""
    auto = value == "auto" or (value is None and schedule is None)
    number = None
    if not auto and value is not None:
        number = whole("budget", value, 1, MAX_BUDGET, ', or "auto"')
    if schedule is not None and (auto or number is not None):
        raise bad_key("budget", value, "leave out either it or budget_per_batch_size")
    return auto, number


def _mean_budget(value: Any, budget: Any) -> int | None:
    """`mean_budget`: nodes of a tree on average, beside a `budget` that is a larger number."""
    key = "mean_budget"
    if value is None:
        return None
    if not is_whole(budget):
        raise bad_key(key, value, "give budget a number too, the most nodes of one request")
    if budget < 2:
        raise bad_key(key, value, f"leave it out; with budget={budget} there is nothing to share")
    return whole(key, value, 1, budget - 1, f", less than budget={budget}")


def _schedule(value: Any) -> list[tuple[int, int, int]] | None:
    """`budget_per_batch_size`: (first, last, budget) for ranges of running requests, or None."""
    key = "budget_per_batch_size"
    if value is None:
        return None
    shape = "give ranges [first, last, budget] of running requests, from 1 up and not overlapping"
    if not isinstance(value, (list, tuple)) or not value:
        raise bad_key(key, value, shape)

    def refuse(entry: Any, why: str) -> ValueError:
        return bad_key(key, value, f"{entry!r} {why}; {shape}")

    schedule: list[tuple[int, int, int]] = []
    expected = 1
    for entry in value:
        if (
            not isinstance(entry, (list, tuple))
            or len(entry) != 3
            or not all(is_whole(each) for each in entry)
        ):
            raise refuse(entry, "is not three whole numbers")
        first, last, budget = entry
        if first < expected if schedule else first != 1:
            where = "before the range before it ends" if schedule else f"at {first}, not at 1"
            raise refuse(entry, f"begins {where}")
        if last < first:
            raise refuse(entry, "ends before it begins")
        if not 0 <= budget <= MAX_BUDGET:
            raise refuse(entry, f"has a budget that is not from 0 to {MAX_BUDGET}")
        expected = last + 1
        schedule.append((first, last, budget))
    if not any(budget for _, _, budget in schedule):
        raise bad_key(key, value, "give at least one range a budget above 0")
    return schedule
