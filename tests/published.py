# SPDX-License-Identifier: Apache-2.0
"""config.json of published drafters, as far as they are known, and small pairs shaped like them.

The keys are the published ones. Sizes and ids are those of a small target, so that a CPU can draft:
hidden sizes, heads, layers, vocabulary, windows. What decides how a drafter drafts stays: block
size, candidates, ranks, convolutions, scale and soft cap, layer kinds, the format.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from tests.conftest import Pair
from tests.engine.models import VOCABULARY, random_pair


class Published(NamedTuple):
    """A drafter of the hub."""

    name: str
    family: str
    config: dict[str, Any]
    """The keys of its config.json that vLLM or DDTree reads."""
    source: str
    """verbatim: the published file; described: keys and values told by others."""
    refused: str = ""
    """What its refusal says, empty: it is taken."""


def _qwen3(**keys: Any) -> dict[str, Any]:
    keys = {"max_position_embeddings": 40960, **keys}
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


LAYERS = 6  # of the target
HIDDEN = 64
WINDOW = 24
MASK_ID = 1
DRAFT_VOCABULARY = 20


def small_pair(published: Published, folder: Path) -> Pair:
    """A target of random weights, and a drafter of this config in small sizes."""
    from transformers import Qwen3Config

    target = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    pair = random_pair(folder, target)
    drafter = folder / "published"
    drafter.mkdir()
    config, block_size = small_config(published.config)
    (drafter / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, published.family), drafter / "model.safetensors")
    return Pair(published.name, pair.target, drafter, block_size)


def small_config(config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The config.json in small sizes, and its block size."""
    small = copy.deepcopy(config)
    decoder = small.get("transformer_layer_config", small)
    nested = small.get("dflash_config", small)
    decoder.update(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_hidden_layers=2,
        vocab_size=VOCABULARY,
    )
    if "layer_types" in decoder:
        decoder["layer_types"] = decoder["layer_types"][:2]
    if "sliding_window" in decoder:
        decoder["sliding_window"] = WINDOW
    if "num_target_layers" in small:
        small["num_target_layers"] = LAYERS
    nested["mask_token_id"] = MASK_ID
    if "target_layer_ids" in nested:
        nested["target_layer_ids"] = [0, 2, 4]
    if "aux_hidden_state_layer_ids" in small:
        small["aux_hidden_state_layer_ids"] = [1, 3, 5]
    if "draft_vocab_size" in small:
        smaller = small["draft_vocab_size"] < config["transformer_layer_config"]["vocab_size"]
        small["draft_vocab_size"] = DRAFT_VOCABULARY if smaller else VOCABULARY
    for rank in ("markov_rank", "selector_rank"):
        if rank in nested:
            nested[rank] = 8
    return small, nested.get("block_size", small.get("block_size"))


def _weights(config: dict[str, Any], family: str) -> dict[str, torch.Tensor]:
    """Random weights under the names that vLLM loads."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    decoder = config.get("transformer_layer_config", config)
    nested = config.get("dflash_config", config)
    rows: dict[str, tuple[int, int]] = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "embed_tokens": (VOCABULARY, HIDDEN),
    }
    norms = {"hidden_norm": HIDDEN, "norm": HIDDEN}
    more: dict[str, torch.Tensor] = {}
    vocabulary = config.get("draft_vocab_size", VOCABULARY)
    if vocabulary < VOCABULARY:
        rows["lm_head"] = (vocabulary, HIDDEN)
        # Every token but the first few.
        more["d2t"] = torch.full((vocabulary,), VOCABULARY - vocabulary)
        more["t2d"] = torch.arange(VOCABULARY) >= VOCABULARY - vocabulary
    for layer in range(decoder["num_hidden_layers"]):
        for name, shape in {
            "mlp.down_proj": (HIDDEN, 96),
            "mlp.gate_proj": (96, HIDDEN),
            "mlp.up_proj": (96, HIDDEN),
            "self_attn.q_proj": (64, HIDDEN),
            "self_attn.k_proj": (32, HIDDEN),
            "self_attn.v_proj": (32, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 64),
        }.items():
            rows[f"layers.{layer}.{name}"] = shape
        norms |= {
            f"layers.{layer}.input_layernorm": HIDDEN,
            f"layers.{layer}.post_attention_layernorm": HIDDEN,
            f"layers.{layer}.self_attn.q_norm": 32,
            f"layers.{layer}.self_attn.k_norm": 32,
        }
        if family == "DFlash2":
            taps, group = nested["conv_kernel_size"], nested["conv_group_size"]
            for name in ("attention_conv", "mlp_conv"):
                kernel = 0.1 * torch.randn(2, taps, HIDDEN, generator=generator)
                kernel[:, 0] += 1
                more[f"layers.{layer}.{name}.base_kernel"] = kernel
                rows[f"layers.{layer}.{name}.kernel_projection"] = (
                    2 * taps * HIDDEN // group,
                    HIDDEN,
                )
    if family == "DFlash2":
        rank = nested["selector_rank"]
        rows["candidate_selector.hidden_projection"] = (rank, HIDDEN)
        for book in ("predecessor", "successor"):
            more[f"candidate_selector.{book}_codebook"] = torch.randn(
                VOCABULARY, rank, generator=generator
            )
    if family == "DSpark":
        rank = config["markov_rank"]
        rows["markov_head.markov_w1"] = (VOCABULARY, rank)
        rows["markov_head.markov_w2"] = (vocabulary, rank)
        rows["confidence_head.proj"] = (1, HIDDEN + rank)
        more["confidence_head.proj.bias"] = torch.zeros(1)
    weights = {f"{name}.weight": random(*shape) for name, shape in rows.items()}
    weights |= {f"{name}.weight": torch.ones(size) for name, size in norms.items()}
    return weights | more
