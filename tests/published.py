# SPDX-License-Identifier: Apache-2.0
"""config.json of published drafters, as far as they are known, and small pairs shaped like them.

The keys are the published ones. Sizes and ids are those of a small target, so that a CPU can draft:
hidden sizes, heads, layers, vocabulary, windows. What decides how a drafter drafts stays: block
size, candidates, ranks, convolutions, scale and soft cap, layer kinds, the format.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A drafter of the hub."""

    name: str
    family: str
    config: dict[str, Any]
    """The keys of its config.json that vLLM or DDTree reads."""
    source: str
    """verbatim: the published file; described: keys and values told by others."""


def _qwen3(**keys: Any) -> dict[str, Any]:
    return {"model_type": "qwen3", "hidden_act": "silu", "head_dim": 128, **keys}


def _speculators(kind: str, layer: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {
        "architectures": [
            {"dflash": "DFlashSpeculator", "dflash2": "DFlash2Speculator"}.get(
                kind, "DSparkSpeculator"
            )
        ],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"architectures": [], "name_or_path": "target"},
        },
        "block_size": 8,
        "transformer_layer_config": layer,
        **keys,
    }


_SELECTOR = {
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "selector_rank": 256,
    "selector_top_k": 16,
}
_SLIDING = {
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
}
_MARKOV = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_QWEN3_8B = _qwen3(
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_hidden_layers=5,
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    rope_theta=1000000,
    vocab_size=151936,
)
_QWEN3_4B = {**_QWEN3_8B, "hidden_size": 2560, "intermediate_size": 9728}
_GEMMA_31B = _qwen3(
    hidden_size=5376,
    intermediate_size=21504,
    num_attention_heads=32,
    num_hidden_layers=5,
    num_key_value_heads=16,
    rms_norm_eps=1e-6,
    vocab_size=262144,
    **_SLIDING,
)

PUBLISHED = [
    Published(
        "incoai/Qwen3.8-27B-DFlash2",
        "DFlash2",
        _qwen3(
            architectures=["DFlash2DraftModel"],
            is_causal=False,
            dflash_config={
                "block_size": 8,
                "mask_token_id": 248070,
                "target_layer_ids": [5, 19, 33, 47, 61],
                **_SELECTOR,
            },
            hidden_size=5120,
            intermediate_size=17408,
            num_attention_heads=32,
            num_hidden_layers=5,
            num_key_value_heads=8,
            num_target_layers=64,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_theta": 10000000, "rope_type": "default"},
            tie_word_embeddings=False,
            vocab_size=248320,
            **_SLIDING,
        ),
        "verbatim",
    ),
    Published(
        "z-lab/Muse-Glimmer-30B-DFlash2",
        "DFlash2",
        _qwen3(
            architectures=["DFlash2DraftModel"],
            is_causal=False,
            dflash_config={
                "block_size": 16,
                "final_logit_softcapping": 20.0,
                "mask_token_id": 201818,
                "output_multiplier": 0.19611613513818404,
                "target_layer_ids": [1, 13, 25, 37, 49],
                **_SELECTOR,
            },
            hidden_size=6656,
            intermediate_size=19968,
            num_attention_heads=32,
            num_hidden_layers=5,
            num_key_value_heads=8,
            num_target_layers=52,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
            tie_word_embeddings=False,
            vocab_size=202048,
            **_SLIDING,
        ),
        "verbatim",
    ),
    Published(
        "RedHatAI/Qwen3-4B-speculator.dflash2",
        "DFlash2",
        _speculators(
            "dflash2",
            {**_QWEN3_4B, "layer_types": ["full_attention"] * 5},
            aux_hidden_state_layer_ids=[2, 10, 18, 26, 34],
            draft_vocab_size=151936,
            mask_token_id=151669,
            **_SELECTOR,
        ),
        "described",
    ),
    Published(
        "deepseek-ai/dspark_qwen3_8b_block7",
        "DSpark",
        {
            **_QWEN3_8B,
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 7,
            "mask_token_id": 151669,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "tie_word_embeddings": False,
            **_MARKOV,
        },
        "described",
    ),
    Published(
        "RedHatAI/gemma-4-31B-it-speculator.dspark",
        "DSpark",
        _speculators(
            "dspark",
            _GEMMA_31B,
            aux_hidden_state_layer_ids=[2, 15, 30, 45, 58],
            draft_vocab_size=32000,
            mask_token_id=4,
            sample_from_anchor=False,
            **_MARKOV,
        ),
        "described",
    ),
    Published(
        "RedHatAI/gemma-4-31B-it-speculator.dflash2",
        "DFlash2",
        _speculators(
            "dflash2",
            _GEMMA_31B,
            aux_hidden_state_layer_ids=[2, 15, 30, 45, 58],
            draft_vocab_size=262144,
            mask_token_id=4,
            **_SELECTOR,
        ),
        "described",
    ),
    Published(
        "RedHatAI/gemma-4-31B-it-speculator.dflash",
        "DFlash",
        _speculators(
            "dflash",
            _GEMMA_31B,
            aux_hidden_state_layer_ids=[2, 15, 30, 45, 58],
            draft_vocab_size=32000,
            mask_token_id=4,
        ),
        "described",
    ),
    Published(
        "RedHatAI/Qwen3-8B-speculator.dflash",
        "DFlash",
        _speculators(
            "dflash",
            _QWEN3_8B,
            aux_hidden_state_layer_ids=[2, 10, 18, 26, 34],
            draft_vocab_size=32000,
            mask_token_id=151669,
        ),
        "described",
    ),
]
