# SPDX-License-Identifier: Apache-2.0
"""Which family a drafter is of, read from its config.json before vLLM reads it.

vLLM must be told the right method when the configuration is made, so its own reading comes too
late.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_ddtree import integration
from vllm_ddtree.config.errors import bad_key
from vllm_ddtree.config.keys import MAX_TOP_K, is_whole
from vllm_ddtree.integration import Family, families

HEADS = {"markov_rank": "Markov head", "selector_rank": "candidate selector"}
"""Keys of heads that plain DFlash does not have."""


def family_of(model: str, revision: str | None) -> Family:
    """The family of a drafter; plain DFlash where its config.json tells nothing else.

    Raises:
        ValueError: no tree can be built of such drafts, or this vLLM has no such drafter.

    """
    checkpoint = integration.checkpoint_config(model, revision, fetch=True)
    for what in _refused(checkpoint):
        raise bad_key("model", model, what)
    kind = checkpoint.get("speculators_model_type")
    if kind is not None:
        if not isinstance(kind, str) or kind not in families.SPECULATORS:
            names = ", ".join(family.value for family in Family)
            raise bad_key(
                "model",
                model,
                f"give a drafter of one of {names} ({model}/config.json has "
                f"speculators_model_type={kind!r})",
            )
        family = families.SPECULATORS[kind]
    else:
        named = families.architectures(checkpoint)
        found = [families.ARCHITECTURES[a] for a in named if a in families.ARCHITECTURES]
        family = found[0] if found else Family.DFLASH
    for what in _mismatched(checkpoint, family):
        raise bad_key("model", model, f"{what}; vLLM would draft without it")
    return family


def _refused(checkpoint: dict[str, Any]) -> Iterator[str]:
    """Why a drafter of these architectures is not taken."""
    for architecture in families.architectures(checkpoint):
        for part, why in families.REFUSED.items():
            if part in architecture:
                yield f"give a DFlash drafter, or use vLLM's own method ({architecture}: {why})"
        if architecture == "DSparkDraftModel":
            yield (
                "give a DFlash drafter, or use vLLM's own method (DSparkDraftModel: "
                "its layers are part of a DeepSeek-V4 target)"
            )
        since = families.SINCE.get(architecture)
        if since is not None and not families.is_known(architecture):
            yield (
                f"vLLM {integration.vllm_version()} has no {architecture}; install vLLM {since} or "
                "later"
            )


def _mismatched(checkpoint: dict[str, Any], family: Family) -> Iterator[str]:
    """What of the checkpoint vLLM does not read, so that its own chain would draft wrongly."""
    nested = checkpoint.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    for section in (checkpoint, nested):
        for key, head in HEADS.items():
            if family is Family.DFLASH and section.get(key):
                yield f"give a plain DFlash drafter, not one with a {head} ({key})"
        projector = section.get("projector_type")
        if projector is not None and projector != family.value.lower():
            yield f"give a plain {family.value} drafter, not one of projector_type={projector!r}"
        kind = section.get("markov_head_type")
        if family is Family.DSPARK and kind not in (None, "vanilla"):
            yield f"give a drafter whose markov_head_type is 'vanilla', not {kind!r}"


def fixed_top_k(model: str, hf_config: Any, family: Family) -> int | None:
    """Candidates a position that the drafter's head was made for; None: any number.

    Raises:
        ValueError: the checkpoint does not say how many, or more than trees take.

    """
    key = family.candidates_key
    if key is None:
        return None
    value = (getattr(hf_config, "dflash_config", None) or {}).get(key)
    if not is_whole(value) or not 1 <= value <= MAX_TOP_K:
        raise bad_key(
            "model",
            model,
            f"give a {family.value} drafter whose dflash_config.{key} is a whole number from 1 to "
            f"{MAX_TOP_K}, not {value!r}",
        )
    return value
