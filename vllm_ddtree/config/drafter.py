# SPDX-License-Identifier: Apache-2.0
"""What a drafter must be: one that drafts a block of positions at once, made for the target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ddtree import integration
from vllm_ddtree.config.errors import bad_key
from vllm_ddtree.config.keys import is_whole, whole
from vllm_ddtree.config.pair import check_pair, draft_vocab_size, warn_of_pair
from vllm_ddtree.integration import Family

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.model import ModelConfig
    from vllm.config.speculative import SpeculativeConfig

MAX_BLOCK_SIZE = 32
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
"""Files of weights, as vLLM's default loader looks for them."""
POINTER = b"version https://git-lfs"
"""How a file begins that stands for one that Git LFS has not fetched."""


def draft_block_size(draft: ModelConfig) -> int | None:
    """Query tokens of a draft forward, wherever a checkpoint keeps them; None: nowhere.

    vLLM's reading of the speculators library's format drops `block_size`
    (transformers_utils/configs/speculators/), so its file is read again. What that library proposes
    by default (`speculative_tokens`) is the block, without the root where the root drafts nothing.
    """
    nested = getattr(draft.hf_config, "dflash_config", None) or {}
    checkpoint = integration.checkpoint_config(draft.model, draft.revision)
    for value in (
        getattr(draft.hf_config, "block_size", None),
        nested.get("block_size"),
        getattr(draft.hf_config, "dspark_block_size", None),
        checkpoint.get("block_size"),
    ):
        if value is not None:
            return value
    try:
        proposed = checkpoint["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        return proposed + (not checkpoint.get("sample_from_anchor", False))
    except (KeyError, IndexError, TypeError):
        return None


def root_drafts(spec: SpeculativeConfig, family: Family) -> bool:
    """Whether the first draft position is the root's own row, not that of the first mask.

    vLLM has it so for DSpark, unless the checkpoint says otherwise (DSparkSpeculator).
    """
    config = spec.draft_model_config.hf_config
    return family is Family.DSPARK and bool(getattr(config, "sample_from_anchor", True))


def check_drafter(spec: SpeculativeConfig, family: Family, asked_tokens: Any = None) -> int:
    """Check the drafter of a speculative config that vLLM has taken.

    Args:
        spec: the speculative config.
        family: the drafter's.
        asked_tokens: the user's `num_speculative_tokens`. As with `method: dflash`, it makes the
            block where the checkpoint names none.

    Returns:
        The drafter's block size: query tokens of a draft forward.

    Raises:
        ValueError: it is no drafter for this target.

    """
    draft = spec.draft_model_config

    def refuse(fix: str) -> ValueError:
        return bad_key("model", draft.model, fix)

    block_size = draft_block_size(draft)
    if block_size is None and asked_tokens is not None:
        own = 0 if root_drafts(spec, family) else 1
        block_size = whole("num_speculative_tokens", asked_tokens, 1, MAX_BLOCK_SIZE - 1) + own
    try:
        layers = integration.aux_layers(spec)
    except TypeError:
        raise refuse("its target_layer_ids are not whole numbers") from None
    section = "" if family is Family.DSPARK else "dflash_config."
    missing = [
        what
        for what, there in (
            ("block_size", block_size),
            (f"{section}mask_token_id", integration.mask_token_id(draft.hf_config) is not None),
            (f"{section}target_layer_ids", layers),
        )
        if not there
    ]
    missing += [key for key in family.head_keys if _value(draft.hf_config, key) is None]
    if missing:
        raise refuse(
            f"give a {family.value} drafter ({draft.model}/config.json has no {', '.join(missing)})"
        )
    assert block_size is not None and layers is not None
    most = MAX_BLOCK_SIZE - root_drafts(spec, family)
    if not is_whole(block_size) or not 2 <= block_size <= most:
        raise refuse(f"its block_size {block_size!r} is outside 2 to {most}")
    if family.candidates_key is not None:
        check_vocabulary(spec, family)
    check_pair(spec, layers)
    warn_of_pair(spec, layers)
    return block_size


def weights_error(model: str) -> str | None:
    """What is wrong with the weights of a checkpoint's folder, without reading them.

    Args:
        model: a folder; of a hub name nothing is known here.

    """
    folder = Path(model)
    if not folder.is_dir():
        return None
    files = [path for pattern in WEIGHTS for path in sorted(folder.glob(pattern))]
    if not files:
        return f"{model} has no weights ({', '.join(WEIGHTS)}); give a folder with all its files"
    for path in files:
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                return f"{path} is a pointer of Git LFS; fetch the weights with git lfs pull"
    return None


def check_weights(vllm_config: VllmConfig) -> None:
    """Raise ValueError for a drafter whose folder has no weights, where vLLM would look for some.

    vLLM's loader says so in the worker, after the target's weights are loaded.
    """
    spec = vllm_config.speculative_config
    load = spec.draft_load_config or vllm_config.load_config
    draft = spec.draft_model_config
    if load.load_format in ("auto", "hf") and (what := weights_error(draft.model)) is not None:
        raise bad_key("model", draft.model, what)


def _value(config: Any, key: str) -> Any:
    """What a drafter's configuration has under a key, or under a key of a section of it."""
    section, _, name = key.rpartition(".")
    if not section:
        return getattr(config, name, None)
    return (getattr(config, section, None) or {}).get(name)


def check_vocabulary(spec: SpeculativeConfig, family: Family) -> None:
    """Raise ValueError for a candidate head whose ids would not be the target's.

    vLLM takes the drafter's ids for the target's (`compute_candidates` of
    model_executor/models/qwen3_dflash2.py and lilicorr.py).
    """
    config = spec.draft_model_config.hf_config
    if draft_vocab_size(config) != config.vocab_size:
        raise bad_key(
            "model",
            spec.draft_model_config.model,
            f"give a {family.value} drafter of the whole vocabulary: its draft_vocab_size is "
            f"{draft_vocab_size(config)} of {config.vocab_size}, and vLLM does not translate the "
            "candidates' ids",
        )
