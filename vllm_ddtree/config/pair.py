# SPDX-License-Identifier: Apache-2.0
"""What a drafter and its target must share, as far as their configurations tell.

vLLM builds the drafter from its own configuration and looks at the target's in the first step
(model_executor/models/qwen3_dflash.py, v1/worker/gpu/spec_decode/dflash/). What cannot work is
refused here, by name; of what may work badly a line in the log warns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_ddtree import integration
from vllm_ddtree.config.errors import bad_key
from vllm_ddtree.config.keys import is_whole

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger("vllm.ddtree")

TRAINED_FOR = "give the drafter trained for this target"
OF_THE_TARGET = ("Laguna",)
"""Parts of the names of architectures that take sizes from the target's configuration."""


def draft_vocab_size(config: PretrainedConfig) -> int:
    """Tokens that the drafter can propose."""
    return getattr(config, "draft_vocab_size", None) or config.vocab_size


def check_pair(spec: SpeculativeConfig, layers: tuple[int, ...]) -> None:
    """Raise ValueError for a drafter that cannot draft for the target.

    Args:
        spec: a speculative config that vLLM has taken.
        layers: target layers that the drafter reads, as vLLM numbers them.

    """
    for what in (
        *_bad_layers(spec, layers),
        *_bad_sizes(spec, len(layers)),
        *_bad_heads(spec),
        *_bad_windows(spec.draft_model_config.hf_config),
        *_bad_vocabulary(spec),
    ):
        raise bad_key("model", spec.draft_model_config.model, what)


def _bad_layers(spec: SpeculativeConfig, layers: tuple[int, ...]) -> Iterator[str]:
    """vLLM gives each layer's hidden states once, and none of layers that are not there."""
    # As config.json has them: DFlash counts the target's layers from 0, the speculators library
    # from 1.
    draft, key, first = spec.draft_model_config, "aux_hidden_state_layer_ids", 1
    if key not in integration.checkpoint_config(draft.model, draft.revision):
        key, first = "target_layer_ids", 0
    if not all(is_whole(layer) for layer in layers):
        yield f"its {key} {[layer - 1 + first for layer in layers]} are not whole numbers"
        return
    ids = [layer - 1 + first for layer in layers]
    num_layers = spec.target_model_config.get_total_num_hidden_layers()
    if max(layers) > num_layers:
        yield (
            f"its {key} {ids} name layer {max(ids)}, and the target's {num_layers} layers end with "
            f"{num_layers - 1 + first}: {TRAINED_FOR}"
        )
    if min(layers) < 0:
        yield f"its {key} {ids} name a layer before the first: {TRAINED_FOR}"
    if len(set(layers)) < len(layers):
        yield f"its {key} {ids} name a layer twice: give a DFlash drafter"


def _bad_sizes(spec: SpeculativeConfig, num_states: int) -> Iterator[str]:
    """What `fc` takes of the target's hidden states (vLLM: `_get_dflash_fc_input_size`)."""
    draft, target = spec.draft_model_config, spec.target_model_config
    config = draft.hf_config
    hyper_connections = getattr(target.hf_text_config, "hc_mult", 1) > 1
    architectures = " ".join(draft.architectures)
    if hyper_connections or any(name in architectures for name in OF_THE_TARGET):
        return
    size = target.get_hidden_size()
    if not _joins_states(config):
        if num_states * size != config.hidden_size:
            yield (
                "it takes hidden states as they are (use_aux_hidden_state=false), of size "
                f"{config.hidden_size}, but gets {num_states} of size {size}: {TRAINED_FOR}"
            )
        return
    key = "target_hidden_size" if getattr(config, "target_hidden_size", None) else "hidden_size"
    expected = getattr(config, key)
    if expected != size:
        yield (
            f"it reads hidden states of size {expected} (its {key}), but the target's are of size "
            f"{size}: {TRAINED_FOR}"
        )


def _joins_states(config: PretrainedConfig) -> bool:
    """Whether `fc` makes one state of the target's several.

    vLLM reads `dflash_config` first, then `eagle_config`, then the key itself
    (model_executor/models/qwen3_dflash.py).
    """
    key = "use_aux_hidden_state"
    nested: dict[str, Any] = {}
    for section in ("eagle_config", "dflash_config"):
        nested |= getattr(config, section, None) or {}
    return bool(nested.get(key, getattr(config, key, True)))


def _bad_heads(spec: SpeculativeConfig) -> Iterator[str]:
    """Heads that cannot be grouped, or spread over the ranks."""
    config, ranks = spec.draft_model_config.hf_config, spec.draft_tensor_parallel_size
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        yield f"its {heads} heads are no multiple of its {kv_heads} KV heads"
    if max(kv_heads, ranks) % min(kv_heads, ranks):
        yield f"its {kv_heads} KV heads cannot be spread over {ranks} ranks"


def _bad_windows(config: PretrainedConfig) -> Iterator[str]:
    """Layers whose attention the checkpoint leaves open (vLLM: `_resolve_layer_attention`)."""
    nested = getattr(config, "dflash_config", None) or {}
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and len(kinds) < config.num_hidden_layers:
        yield f"its layer_types name {len(kinds)} of its {config.num_hidden_layers} layers"
    windowed = nested.get("use_swa", False) or "sliding_attention" in (kinds or [])
    key = "swa_window_size" if "swa_window_size" in nested else "sliding_window"
    window = nested.get(key, getattr(config, key, None))
    if windowed and window is None:
        yield "it has sliding-window layers, but config.json has no sliding_window"
    elif windowed and not (is_whole(window) and window >= 1):
        yield f"its {key} {window!r} is no whole number of at least 1"
    if nested.get("sample_from_anchor", False):
        yield "give a plain DFlash drafter (its sample_from_anchor makes another block)"


def _bad_vocabulary(spec: SpeculativeConfig) -> Iterator[str]:
    """Tokens for which the target has no row."""
    config = spec.draft_model_config.hf_config
    size, rows = draft_vocab_size(config), _rows(spec.target_model_config.get_vocab_size())
    if size > rows:
        yield f"its vocabulary has {size} tokens, the target's {rows}: {TRAINED_FOR}"
    mask = integration.mask_token_id(config)
    # The drafter's own embeddings, or the target's: the loaded drafter shows which.
    rows = max(rows, _rows(config.vocab_size))
    if mask is not None and not 0 <= mask < rows:
        yield f"its mask_token_id {mask} is outside the vocabulary of {rows} tokens: {TRAINED_FOR}"


def _rows(vocab_size: int) -> int:
    """Rows of vLLM's embedding (layers/vocab_parallel_embedding.py pads it to 64)."""
    return -(-vocab_size // 64) * 64


def set_draft_positions(spec: SpeculativeConfig) -> None:
    """Raise the drafter's `max_position_embeddings` to the target's length; say so.

    The drafter is asked at the target's positions, and reads past its table of rotary angles at
    those beyond its own. vLLM does this for EAGLE (config/speculative.py).
    """
    config, length = spec.draft_model_config.hf_config, spec.target_model_config.max_model_len
    own = getattr(config, "max_position_embeddings", None)
    if own is None or own >= length:
        return
    logger.warning_once(
        "ddtree: drafter %s was made for %d positions (max_position_embeddings), and "
        "--max-model-len is %d; beyond its own it may draft badly",
        spec.draft_model_config.model,
        own,
        length,
    )
    config.max_position_embeddings = length


def warn_of_pair(spec: SpeculativeConfig, layers: tuple[int, ...]) -> None:
    """Say what lets the drafter work badly for this target: it may have been made for another."""
    for what in (*_odd_target(spec, layers), *_odd_vocabulary(spec)):
        logger.warning_once(
            "ddtree: drafter %s may draft badly for this target: %s",
            spec.draft_model_config.model,
            what,
        )


def _odd_target(spec: SpeculativeConfig, layers: tuple[int, ...]) -> Iterator[str]:
    config: Any = spec.draft_model_config.hf_config
    num_layers = spec.target_model_config.get_total_num_hidden_layers()
    made_for = getattr(config, "num_target_layers", None)
    if made_for is not None and made_for != num_layers:
        yield f"it was made for one of {made_for} layers (num_target_layers), this has {num_layers}"
    if list(layers) != sorted(layers):
        yield "its target_layer_ids are not in ascending order, in which vLLM reads them"


def _odd_vocabulary(spec: SpeculativeConfig) -> Iterator[str]:
    draft, target = spec.draft_model_config, spec.target_model_config
    size, own = target.get_vocab_size(), draft.hf_config.vocab_size
    if own != size:
        yield f"its vocab_size is {own}, the target's {size}"
    ours = integration.tokenizer_vocabulary(draft.model, draft.revision)
    theirs = integration.tokenizer_vocabulary(target.tokenizer, target.tokenizer_revision)
    if ours is not None and theirs is not None and ours != theirs:
        yield "its tokenizer.json has another vocabulary than the target's"
