# SPDX-License-Identifier: Apache-2.0
"""What vLLM refuses of a configuration that is not DDTree's but may have been meant to be, and what
vLLM advises for one that is.

This is imported when something was refused, and reads nothing of vLLM.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

TREE_KEYS = (
    "budget",
    "budget_per_batch_size",
    "mean_budget",
    "top_k",
    "speculative_token_tree",
)
"""Keys that only somebody who wants trees gives."""


def is_near(method: Any) -> bool:
    """Whether a method's name is almost "ddtree"."""
    if not isinstance(method, str):
        return False
    letters = re.sub(r"[^a-z0-9]", "", method.lower())
    return bool(difflib.get_close_matches(letters, ["ddtree"], cutoff=0.8))


def meant(method: Any, keys: dict[Any, Any], error: Exception) -> ValueError | None:
    """One line for what vLLM refuses, if trees were meant.

    Args:
        method: as given, None if none is.
        keys: the speculative_config with the short flags.
        error: vLLM's.

    """
    if is_near(method):
        return ValueError(
            f"speculative_config: there is no method={method!r}; did you mean 'ddtree'?"
        )
    names = [key.replace("-", "_") for key in keys if isinstance(key, str)]
    ours = [name for name in names if name in TREE_KEYS]
    add = 'give "method": "ddtree"'
    if ours and method is None:
        return ValueError(
            f"speculative_config: no method is given, and {ours[0]} is for trees: {add}"
        )
    if ours:
        return ValueError(
            f"speculative_config: {ours[0]} is for trees, and method={method!r} has none: leave it "
            f"out or {add}"
        )
    if method is None and "model" in names:
        return ValueError(
            f"speculative_config: {_reason(error)}; no method is given: for trees {add}"
        )
    return None


def advice(error: ValueError) -> ValueError | None:
    """One line for a DDTree configuration that vLLM refuses in words that mislead.

    Toward vLLM the budget is num_speculative_tokens; the user's key of that name limits the depth.
    """
    reason = _reason(error)
    if "num_speculative_tokens" not in reason or "ddtree" in reason:
        return None
    return ValueError(
        f"method ddtree: vLLM says {reason!r}; its num_speculative_tokens is the budget here: "
        "lower budget, or set it to a number if it is auto"
    )


def _reason(error: Exception) -> str:
    """vLLM's own words, in one line."""
    details = getattr(error, "errors", None)
    text = details()[0]["msg"] if callable(details) else str(error)
    return " ".join(text.removeprefix("Value error, ").split())
