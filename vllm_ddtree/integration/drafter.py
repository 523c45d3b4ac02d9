# SPDX-License-Identifier: Apache-2.0
"""What vLLM reads from a drafter's configuration."""

import json
from pathlib import Path
from typing import Any


def aux_layers(speculative_config: Any) -> tuple[int, ...] | None:
    """Target layers whose inputs the drafter reads, as vLLM numbers them (DFlash's ids + 1)."""
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

    return eagle3_utils.get_eagle3_aux_layers_from_config(speculative_config)


def mask_token_id(hf_config: Any) -> int | None:
    """The token id of a draft block's masked queries, None when the checkpoint has none."""
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    try:
        return get_parallel_drafting_token_id(hf_config)
    except ValueError:
        return None


def _read(model: str, name: str, revision: str | None) -> bytes | None:
    """A checkpoint's file as it stands on this machine, None if it is not here."""
    from vllm.transformers_utils.repo_utils import try_get_local_file

    path = try_get_local_file(model, name, revision)
    return path.read_bytes() if isinstance(path, Path) else None


def checkpoint_config(model: str, revision: str | None, fetch: bool = False) -> dict[str, Any]:
    """A checkpoint's config.json as it stands on this machine, empty if it is not here.

    vLLM's own reading leaves out keys that it does not know (transformers_utils/configs/).

    Args:
        model: its folder or hub name.
        revision: of the hub.
        fetch: whether to bring the file from the hub, as vLLM will.

    """
    if fetch:
        from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

        try:
            found = get_hf_file_to_dict("config.json", model, revision)
        except Exception:
            return {}  # vLLM's own reading says what is wrong
        return found if isinstance(found, dict) else {}
    return json.loads(_read(model, "config.json", revision) or b"{}")


def tokenizer_vocabulary(model: str | None, revision: str | None) -> Any:
    """The vocabulary in a checkpoint's tokenizer.json, added tokens aside.

    Returns:
        Tokens and their ids, as the file has them; None if it is not on this machine.

    """
    data = _read(model, "tokenizer.json", revision) if model else None
    return None if data is None else json.loads(data).get("model", {}).get("vocab")
