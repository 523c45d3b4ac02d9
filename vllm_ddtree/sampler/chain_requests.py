# SPDX-License-Identifier: Apache-2.0
"""Requests that verify a chain instead of a tree.

vLLM's penalties, bad words, thinking budget, grammars and custom logits processors take the
preceding rows of a request as tokens already generated. On a tree these rows include siblings, so
such a request gets the tree's spine alone: a chain of up to the draft depth inside the same rows,
for which vLLM's own processing is right as it stands.
"""

from typing import Any


def needs_chain(sampling_params: Any) -> bool:
    """Whether the parameters depend on the tokens before a row."""
    if sampling_params is None:
        return False
    p = sampling_params
    return bool(
        p.presence_penalty
        or p.frequency_penalty
        or p.repetition_penalty != 1.0
        or p.bad_words
        or p.structured_outputs is not None
        or getattr(p, "thinking_token_budget", None) is not None
        or getattr(p, "repetition_detection", None) is not None
    )
