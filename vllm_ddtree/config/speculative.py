# SPDX-License-Identifier: Apache-2.0
"""The speculative configuration of `method: ddtree`.

Toward vLLM a `DDTreeConfig` is a DFlash draft whose `num_speculative_tokens` is the budget:
scheduler, decode query length, request buffers and graph sizes follow from that one number. The
draft's own numbers (block size, depth, candidates) stand beside it and are used by the proposer
only.
"""

import dataclasses
import difflib
from typing import Any

from pydantic import Field, ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_ddtree import integration, presence
from vllm_ddtree.budget.tiers import SCHEDULE

MAX_BUDGET = 255
MAX_TOP_K = 64
MAX_BLOCK_SIZE = 32
DEFAULT_TOP_K = 16
_LISTENERS = "presence_listeners"
"""Key of the pickled state."""

# Keys of our own, and keys of `method: dflash` that keep their meaning.
OWN_KEYS = ("budget", "budget_per_batch_size", "top_k", "num_speculative_tokens")
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
# Keys of `method: dflash` that DDTree takes at one value only: key -> (value, reason).
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
    block_size: int = Field(default=2, ge=2)
    """Query tokens of the draft forward (anchor and masks), from the drafter's config."""

    @property
    def max_depth(self) -> int:
        """Deepest node that a tree can have: a tree of n nodes is at most n deep."""
        return min(self.depth_limit, self.budget)

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Draft queries a request beyond the one vLLM counts; independent of the budget."""
        own = super().max_num_new_slots_for_drafting
        return own and self.block_size - 1

    def __repr__(self) -> str:
        budget = "auto" if self.auto_budget else self.budget
        return (
            f"SpeculativeConfig(method='ddtree', model={self.draft_model_config.model!r}, "
            f"budget={budget}, depth={self.depth_limit}, top_k={self.top_k}, "
            f"block_size={self.block_size})"
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


def _bad(key: Any, value: Any, fix: str) -> ValueError:
    name = key if isinstance(key, str) and key.isidentifier() else repr(key)
    return ValueError(f"speculative_config: {name}={value!r} is not valid for method ddtree: {fix}")


def _whole(
    keys: dict[str, Any], key: str, low: int, high: int, default: int | None, also: str = ""
) -> int | None:
    """A whole number between low and high, or the default when the key is absent.

    `also` ends the error.
    """
    value = keys.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _bad(key, value, f"give a whole number from {low} to {high}{also}")
    return value


def _schedule(keys: dict[str, Any]) -> list[tuple[int, int, int]] | None:
    """`budget_per_batch_size`: (first, last, budget) for ranges of running requests, or None."""
    key = "budget_per_batch_size"
    value = keys.get(key)
    if value is None:
        return None
    shape = "give ranges [first, last, budget] of running requests, from 1 up and not overlapping"
    if not isinstance(value, (list, tuple)) or not value:
        raise _bad(key, value, shape)

    def refuse(entry: Any, why: str) -> ValueError:
        return _bad(key, value, f"{entry!r} {why}; {shape}")

    schedule: list[tuple[int, int, int]] = []
    expected = 1
    for entry in value:
        if (
            not isinstance(entry, (list, tuple))
            or len(entry) != 3
            or any(isinstance(x, bool) or not isinstance(x, int) for x in entry)
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
        raise _bad(key, value, "give at least one range a budget above 0")
    return schedule


def check_keys(keys: dict[str, Any]) -> None:
    """Raise ValueError for a key that DDTree does not take."""
    present = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    dflash = [key for key in DFLASH_KEYS if key in present]
    known = (*OWN_KEYS, *DFLASH_KEYS, *FIXED_KEYS)
    for key, value in keys.items():
        if key in FIXED_KEYS:
            allowed, reason = FIXED_KEYS[key]
            if value is not None and value != allowed:
                raise _bad(key, value, f"leave it out or give {allowed!r} ({reason})")
        elif key == "num_speculative_tokens_per_batch_size":
            raise _bad(key, value, "use budget_per_batch_size, in nodes")
        elif key == "tensor_parallel_size":
            raise _bad(key, value, "use draft_tensor_parallel_size")
        elif key not in known:
            near = difflib.get_close_matches(key, known, 1)
            names = ", ".join((*OWN_KEYS, *dflash))
            hint = f"did you mean {near[0]!r}?" if near else f"its keys are {names}"
            raise _bad(key, value, f"there is no such key; {hint}")
        elif key in DFLASH_KEYS and key not in dflash:
            raise _bad(
                key, value, f"vLLM {integration.vllm_version()} has no such key; leave it out"
            )


def draft_block_size(hf_config: Any) -> int | None:
    """`block_size` of a DFlash drafter's config.json, wherever the checkpoint keeps it."""
    nested = getattr(hf_config, "dflash_config", None) or {}
    value = getattr(hf_config, "block_size", None)
    return value if value is not None else nested.get("block_size")


def _check_drafter(spec: "DDTreeConfig") -> int:
    """The drafter's block size; ValueError unless it is a plain DFlash drafter for this target."""
    draft = spec.draft_model_config
    name = draft.model
    original = getattr(draft.hf_config, "model", None) or draft.hf_config
    architectures = getattr(original, "architectures", None) or draft.architectures or ["unknown"]
    special = [a for a in architectures if any(s in a for s in ("DFlash2", "LiLiCorr", "XPress"))]
    if special:
        raise _bad("model", name, f"give a plain DFlash drafter, not {special[0]}")
    block_size = draft_block_size(draft.hf_config)
    layers = integration.aux_layers(spec)
    missing = [
        what
        for what, there in (
            ("block_size", block_size),
            ("dflash_config.mask_token_id", integration.mask_token_id(draft.hf_config) is not None),
            ("dflash_config.target_layer_ids", layers),
        )
        if not there
    ]
    if missing:
        raise _bad(
            "model",
            name,
            f"give a DFlash drafter ({architectures[0]} without {', '.join(missing)} is none)",
        )
    assert block_size is not None and layers is not None
    if not 2 <= block_size <= MAX_BLOCK_SIZE:
        raise _bad("model", name, f"its block_size {block_size} is outside 2 to {MAX_BLOCK_SIZE}")
    num_layers = spec.target_model_config.get_total_num_hidden_layers()
    if max(layers) > num_layers:
        raise _bad(
            "model",
            name,
            f"it reads target layer {max(layers)}, but the target has {num_layers} layers: "
            "give the drafter trained for this target",
        )
    return block_size


def _refused_by_vllm(error: ValidationError | OSError, keys: dict[str, Any]) -> ValueError:
    """One line for what vLLM's own configuration refuses of the user's keys."""
    model = keys["model"]
    if isinstance(error, OSError):
        where = "no such folder here, or on the hub"
        return _bad(
            "model", model, f"give a DFlash drafter ({where}: {' '.join(str(error).split())})"
        )
    first = error.errors()[0]
    reason = " ".join(first["msg"].removeprefix("Value error, ").split())
    if reason.startswith("Model architectures"):
        return _bad("model", model, "give a DFlash drafter; this is no draft model")
    field = first["loc"][0] if first["loc"] else None
    if first["type"] == "unexpected_keyword_argument":
        reason = f"it has no key {first['loc'][-1]!r}; leave that out"
    elif field == "attention_backend" and not isinstance(keys[field], str):
        reason = "give the name of an attention backend, FLASH_ATTN for example"
    # The field, or the key that vLLM's words name.
    named = [] if field is None else [str(field)]
    named += [key for key in keys if key != "model" and key in reason]
    for key in named:
        if keys.get(key) is not None or key in first["loc"]:
            return _bad(key, keys.get(key), reason)
    if " ".join(model.split()) in reason:
        return _bad("model", model, f"give a DFlash drafter ({reason})")
    return ValueError(f"speculative_config is not valid for method ddtree: {reason}")


def _spelled(given: dict[Any, Any]) -> dict[str, Any]:
    """The user's keys with underscores for hyphens, each given once."""
    keys: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise _bad(key, value, "a key is a name")
        name = key.replace("-", "_")
        if name in keys:
            raise _bad(name, value, f"it is given twice, also as {keys[name]!r}")
        keys[name] = value
    return keys


def make_config(keys: dict[str, Any], target_model_config: Any, target_parallel_config: Any) -> Any:
    """A DDTreeConfig from the user's keys.

    Raises:
        ValueError: one line naming the key, its value and the fix.

    """
    keys = _spelled(keys)
    check_keys(keys)
    schedule = _schedule(keys)
    auto = keys.get("budget") == "auto" or (keys.get("budget") is None and schedule is None)
    if auto:
        keys.pop("budget", None)
    budget = _whole(keys, "budget", 1, MAX_BUDGET, None, ', or "auto"')
    if schedule is not None:
        if auto or budget is not None:
            given = "auto" if auto else budget
            raise _bad("budget", given, "leave out either it or budget_per_batch_size")
        budget = max(nodes for _, _, nodes in schedule)
    elif auto:
        schedule = SCHEDULE
        budget = max(nodes for _, _, nodes in schedule)
    assert budget is not None
    top_k = _whole(keys, "top_k", 1, MAX_TOP_K, DEFAULT_TOP_K)
    assert top_k is not None
    model = keys.get("model")
    if not isinstance(model, str) or not model:
        raise _bad("model", model, "give the DFlash drafter's folder or hub name")
    rest = {key: value for key, value in keys.items() if key in DFLASH_KEYS and key != "method"}
    try:
        built = DDTreeConfig(
            method="dflash",
            num_speculative_tokens=budget,
            budget=budget,
            num_speculative_tokens_per_batch_size=schedule,
            auto_budget=auto,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
            **rest,
        )
    except (ValidationError, OSError) as error:
        raise _refused_by_vllm(error, {**rest, "model": model}) from error
    built.block_size = _check_drafter(built)
    most = built.block_size - 1
    also = ", the drafter's block_size - 1: it limits the depth, budget sets the number of nodes"
    depth = _whole(keys, "num_speculative_tokens", 1, most, most, also)
    assert depth is not None
    built.depth_limit = depth
    # A node is among the budget best only if its rank is below the budget.
    built.top_k = min(top_k, budget, built.draft_model_config.get_vocab_size())
    presence.announce()
    return built
