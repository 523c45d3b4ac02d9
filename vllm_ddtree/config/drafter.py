# SPDX-License-Identifier: Apache-2.0
"""What a drafter must be: a plain DFlash drafter, made for the target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ddtree import integration
from vllm_ddtree.config.errors import bad_key
from vllm_ddtree.config.keys import is_whole, whole
from vllm_ddtree.config.pair import check_pair, warn_of_pair

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.model import ModelConfig
    from vllm.config.speculative import SpeculativeConfig

MAX_BLOCK_SIZE = 32
OTHER_DRAFTERS = ("DFlash2", "LiLiCorr", "XPress")
"""Parts of the names of architectures that draft otherwise than DFlash."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
"""Files of weights, as vLLM's default loader looks for them."""
POINTER = b"version https://git-lfs"
"""How a file begins that stands for one that Git LFS has not fetched."""


def check_format(model: str, revision: str | None) -> None:
    """Raise ValueError for a drafter of the speculators library that is not plain DFlash."""
    checkpoint = integration.checkpoint_config(model, revision)
    for key in ("speculators_model_type", "projector_type"):
        kind = checkpoint.get(key, "dflash")
        if kind != "dflash":
            what = f"{model}/config.json has {key}={kind!r}"
            raise bad_key("model", model, f"give a plain DFlash drafter ({what})")


def draft_block_size(draft: ModelConfig) -> int | None:
    """Query tokens of a draft forward, wherever a DFlash checkpoint keeps them; None: nowhere.

    vLLM's reading of the speculators library's format drops `block_size`
    (transformers_utils/configs/speculators/), so its file is read again. What that library proposes
    by default (`speculative_tokens`) is the block without the root.
    """
    nested = getattr(draft.hf_config, "dflash_config", None) or {}
    checkpoint = integration.checkpoint_config(draft.model, draft.revision)
    for value in (
        getattr(draft.hf_config, "block_size", None),
        nested.get("block_size"),
        checkpoint.get("block_size"),
    ):
        if value is not None:
            return value
    try:
        return checkpoint["speculators_config"]["proposal_methods"][0]["speculative_tokens"] + 1
    except (KeyError, IndexError, TypeError):
        return None


def check_drafter(spec: SpeculativeConfig, asked_tokens: Any = None) -> int:
    """Check the drafter of a speculative config that vLLM has taken.

    Args:
        spec: the speculative config.
        asked_tokens: the user's `num_speculative_tokens`. As with `method: dflash`, it makes the
            block where the checkpoint names none.

    Returns:
        The drafter's block size: query tokens of a draft forward.

    Raises:
        ValueError: it is no plain DFlash drafter for this target.

    """
    draft = spec.draft_model_config

    def refuse(fix: str) -> ValueError:
        return bad_key("model", draft.model, fix)

    check_format(draft.model, draft.revision)
    original: Any = getattr(draft.hf_config, "model", None) or draft.hf_config
    architectures = getattr(original, "architectures", None) or draft.architectures or ["unknown"]
    special = [a for a in architectures if any(other in a for other in OTHER_DRAFTERS)]
    if special:
        raise refuse(f"give a plain DFlash drafter, not {special[0]}")
    block_size = draft_block_size(draft)
    if block_size is None and asked_tokens is not None:
        block_size = whole("num_speculative_tokens", asked_tokens, 1, MAX_BLOCK_SIZE - 1) + 1
    try:
        layers = integration.aux_layers(spec)
    except TypeError:
        raise refuse("its target_layer_ids are not whole numbers") from None
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
        raise refuse(
            f"give a DFlash drafter ({draft.model}/config.json has no {', '.join(missing)})"
        )
    assert block_size is not None and layers is not None
    if not is_whole(block_size) or not 2 <= block_size <= MAX_BLOCK_SIZE:
        raise refuse(f"its block_size {block_size!r} is outside 2 to {MAX_BLOCK_SIZE}")
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
