# SPDX-License-Identifier: Apache-2.0
"""How refusals read: one line with what was given and what to do."""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError


def bad_key(key: Any, value: Any, fix: str) -> ValueError:
    """A key of the speculative_config."""
    name = key if isinstance(key, str) and key.isidentifier() else repr(key)
    return ValueError(f"speculative_config: {name}={value!r} is not valid for method ddtree: {fix}")


def bad_flag(flag: str, value: Any, fix: str) -> ValueError:
    """A setting of the engine, by its flag."""
    return ValueError(f"method ddtree does not support {flag}={value}: {fix}")


def bad_target(name: str, what: str) -> ValueError:
    """A target that DDTree cannot follow; vLLM's chain can."""
    return ValueError(f"method ddtree does not support target {name!r}: {what}; use method dflash")


def bad_layer(name: str, what: str, fix: str = "use method dflash for this target") -> ValueError:
    """A target's attention layer that cannot verify trees."""
    return ValueError(f"method ddtree cannot verify trees in target layer {name}: {what}; {fix}")


def refused_by_vllm(
    error: ValidationError | StrictDataclassError | OSError | KeyError, keys: dict[str, Any]
) -> ValueError:
    """One line for what vLLM's own configuration refuses of the user's keys.

    Args:
        error: vLLM's.
        keys: the keys that were given to vLLM; "model" is among them.

    """
    model = keys["model"]
    if isinstance(error, OSError):
        where = "no such folder here, or on the hub"
        return bad_key(
            "model", model, f"give a DFlash drafter ({where}: {' '.join(str(error).split())})"
        )
    if isinstance(error, KeyError):
        # Of vLLM's reading of a checkpoint (transformers_utils/configs/speculators/algos.py).
        missing = f"{model}/config.json has no {error.args[0]}"
        return bad_key("model", model, f"give a DFlash drafter ({missing})")
    if isinstance(error, StrictDataclassError):
        # Of transformers' reading of config.json.
        what = f"{model}/config.json: {' '.join(str(error).split())}"
        return bad_key("model", model, f"give a DFlash drafter ({what})")
    first = error.errors()[0]
    reason = " ".join(first["msg"].removeprefix("Value error, ").split())
    if reason.startswith("Model architectures"):
        return bad_key("model", model, "give a DFlash drafter; this is no draft model")
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
            return bad_key(key, keys.get(key), reason)
    if " ".join(model.split()) in reason:
        return bad_key("model", model, f"give a DFlash drafter ({reason})")
    return ValueError(f"speculative_config is not valid for method ddtree: {reason}")
