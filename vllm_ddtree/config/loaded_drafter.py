# SPDX-License-Identifier: Apache-2.0
"""What a drafter must be, as far as its attention and its loaded weights tell.

This runs in the workers, at start. Its imports are too heavy for the process that makes the
configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal

from vllm_ddtree import integration
from vllm_ddtree.config.errors import bad_key
from vllm_ddtree.config.pair import TRAINED_FOR, draft_vocab_size
from vllm_ddtree.integration import Family
from vllm_ddtree.proposer.scores import why_no_lattice

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from vllm_ddtree.config.speculative import DDTreeConfig

logger = init_logger("vllm.ddtree")


def check_draft_backend(vllm_config: VllmConfig) -> None:
    """Raise ValueError for a drafter whose attention no backend here can do. No weight is needed.

    Kernels are picky about head sizes, and not all attend to later tokens, as a DFlash block does.
    """
    spec: DDTreeConfig = vllm_config.speculative_config
    draft = spec.draft_model_config
    size, non_causal = draft.get_head_size(), dflash_has_any_non_causal(draft.hf_config)
    why = integration.draft_backend_error(vllm_config, size, non_causal)
    if why is not None:
        backend = spec.attention_backend
        who = (
            "no attention backend here takes"
            if backend is None
            else f"{backend.name} does not take"
        )
        what = f"{who} its heads of {size}: {why}"
        raise bad_key("model", draft.model, what)


def check_loaded_drafter(vllm_config: VllmConfig, model: nn.Module) -> None:
    """Raise ValueError for a loaded drafter that lacks weights that its configuration needs.

    vLLM gives it the target's embeddings and head where its checkpoint has none
    (v1/worker/gpu/spec_decode/dflash/utils.py), whatever their sizes.

    Args:
        vllm_config: the engine's.
        model: the drafter.

    """
    spec: DDTreeConfig = vllm_config.speculative_config
    draft = spec.draft_model_config
    problems = [_bad_embeddings(draft.hf_config, model), _bad_head(draft.hf_config, model)]
    if spec.family == Family.DSPARK:
        problems.append(why_no_lattice(model))
    if (spec.draft_load_config or vllm_config.load_config).load_format != "dummy":
        problems.append(_bad_vocabulary(vllm_config, model))
    for what in problems:
        if what is not None:
            raise bad_key("model", draft.model, what)


def _bad_embeddings(config: Any, model: Any) -> str | None:
    """What does not fit of the embeddings of the block's tokens."""
    embeddings = getattr(model.model, "embed_tokens", None)
    size = getattr(embeddings, "embedding_dim", config.hidden_size)
    if size != config.hidden_size:
        return (
            f"it has no embed_tokens of its own, and the target's are of size {size}, not "
            f"{config.hidden_size}: {TRAINED_FOR}"
        )
    mask, rows = integration.mask_token_id(config), getattr(embeddings, "num_embeddings_padded", 0)
    if mask is not None and rows and mask >= rows:
        return f"its mask_token_id {mask} is outside its embeddings, of {rows} tokens"
    return None


def _bad_head(config: Any, model: Any) -> str | None:
    """What does not fit of the head."""
    head = getattr(model, "lm_head", None)
    size = getattr(head, "embedding_dim", config.hidden_size)
    if size != config.hidden_size:
        return (
            f"it has no lm_head of its own, and the target's is of size {size}, not "
            f"{config.hidden_size}: {TRAINED_FOR}"
        )
    return None


def _bad_vocabulary(vllm_config: Any, model: Any) -> str | None:
    """What a smaller vocabulary lacks: a head of its own, and the target's id of each token."""
    config = vllm_config.speculative_config.draft_model_config.hf_config
    vocab = draft_vocab_size(config)
    offsets = getattr(model, "draft_id_to_target_id", None)
    if offsets is None or vocab == config.vocab_size:
        return None
    proposes = f"it proposes {vocab} tokens (draft_vocab_size)"
    if not getattr(model, "has_own_lm_head", False):
        return f"{proposes}, and has no lm_head for them"
    if not bool(offsets.any()):
        # vLLM starts from zeros: the checkpoint has no d2t, or one that says just this.
        logger.warning_once(
            "ddtree: drafter %s proposes %d tokens (draft_vocab_size) and maps none to another id "
            "(d2t); if its tokens are not the target's first %d, it drafts badly",
            vllm_config.speculative_config.draft_model_config.model,
            vocab,
            vocab,
        )
    ids = torch.arange(vocab, device=offsets.device) + offsets
    known = min(config.vocab_size, vllm_config.model_config.get_vocab_size())
    if int(ids.min()) < 0 or int(ids.max()) >= known:
        return f"its d2t names tokens outside the vocabulary of {known}: {TRAINED_FOR}"
    return None
