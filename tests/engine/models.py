# SPDX-License-Identifier: Apache-2.0
"""Small targets with sliding windows, soft-caps and sinks, each with a DFlash drafter.

`trained_pair`: a trained pair with another attention in its target, which still knows what to say.
`random_pair`: random weights of any architecture of Transformers; its vocabulary is so small that
trees often hold the target's choice.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from vllm.model_executor.models import qwen3
from vllm.model_executor.models.registry import ModelRegistry

from tests.conftest import NANO, Pair

VOCABULARY = 24
BLOCK_SIZE = 8
DRAFT_LAYERS = 2


class VariedQwen3ForCausalLM(qwen3.Qwen3ForCausalLM):
    """Qwen3 whose config gives lists by layer: `windows`, `soft_caps` and `sinks` (by head)."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        attention = qwen3.Attention

        def make(*args: Any, **kwargs: Any) -> Any:
            layer = int(kwargs["prefix"].split("layers.")[1].split(".")[0])
            kwargs["per_layer_sliding_window"] = config.windows[layer]
            kwargs["logits_soft_cap"] = config.soft_caps[layer]
            if config.sinks[layer] is not None:
                kwargs["sinks"] = torch.tensor(config.sinks[layer])
            return attention(*args, **kwargs)

        with mock.patch.object(qwen3, "Attention", make):
            super().__init__(vllm_config=vllm_config, prefix=prefix)


def trained_pair(folder: Path, pair: Pair = NANO, **config: Any) -> Pair:
    """A trained pair, its target with changes in its config.json; the drafter stays as it is."""
    target = folder / "target"
    shutil.copytree(pair.target, target)
    target.chmod(0o755)
    (target / "config.json").chmod(0o644)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return Pair(folder.name, target, pair.drafter, pair.block_size)


def varied_pair(
    folder: Path,
    windows: list[int | None],
    soft_caps: list[float | None],
    sinks: list[list[float] | None],
    pair: Pair = NANO,
) -> Pair:
    """`trained_pair` with a window, a soft-cap and sinks of its own in each layer."""
    ModelRegistry.register_model("VariedQwen3ForCausalLM", VariedQwen3ForCausalLM)
    return trained_pair(
        folder,
        pair,
        architectures=["VariedQwen3ForCausalLM"],
        windows=windows,
        soft_caps=soft_caps,
        sinks=sinks,
    )


def random_pair(folder: Path, config: Any, seed: int = 0) -> Pair:
    """A target of this Transformers configuration and a drafter that fits it; no tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    target, drafter = folder / "target", folder / "drafter"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)

    random_drafter(drafter, config)
    return Pair(folder.name, target, drafter, BLOCK_SIZE)


def random_drafter(
    drafter: Path, config: Any, hidden_size: int | None = None, own_tokens: bool = False
) -> None:
    """A drafter of random weights for a target of this configuration.

    Args:
        drafter: the folder to write.
        config: the target's.
        hidden_size: the drafter's; None: the target's.
        own_tokens: whether it has embeddings and a head, and does not take the target's.

    """
    of_target = config.hidden_size
    hidden, heads, kv_heads, dim = hidden_size or of_target, 2, 1, 32
    num_layers, aux_layers = config.num_hidden_layers, [0, config.num_hidden_layers - 2]
    drafter.mkdir()
    (drafter / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["DFlashDraftModel"],
                "model_type": "qwen3",
                "attention_bias": False,
                "head_dim": dim,
                "hidden_act": "silu",
                "hidden_size": hidden,
                "intermediate_size": hidden,
                "max_position_embeddings": 4096,
                "num_attention_heads": heads,
                "num_hidden_layers": DRAFT_LAYERS,
                "num_key_value_heads": kv_heads,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "torch_dtype": "float32",
                "vocab_size": config.vocab_size,
                "target_hidden_size": of_target,
                "block_size": BLOCK_SIZE,
                "num_target_layers": num_layers,
                "layer_types": ["full_attention"] * DRAFT_LAYERS,
                "dflash_config": {"mask_token_id": 1, "target_layer_ids": aux_layers},
            }
        )
    )
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, of_target * len(aux_layers)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if own_tokens:
        shapes["embed_tokens.weight"] = shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(DRAFT_LAYERS):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "mlp.down_proj": (hidden, hidden),
            "mlp.gate_proj": (hidden, hidden),
            "mlp.up_proj": (hidden, hidden),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "self_attn.q_proj": (heads * dim, hidden),
            "self_attn.k_proj": (kv_heads * dim, hidden),
            "self_attn.v_proj": (kv_heads * dim, hidden),
            "self_attn.o_proj": (hidden, heads * dim),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    save_file(weights, drafter / "model.safetensors")


def qwen3_moe(folder: Path, **sizes: Any) -> Pair:
    """vLLM's own Qwen3-MoE: a row's experts follow from the row alone; one layer without."""
    from transformers import Qwen3MoeConfig

    keys: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return random_pair(folder, Qwen3MoeConfig(vocab_size=VOCABULARY, **{**keys, **sizes}))


HYBRID: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear", "full")],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""Gated-delta-net layers, two KV groups of them, beside attention."""


def qwen3_5(folder: Path, tokenizer: Path | None = None, **sizes: Any) -> Pair:
    """vLLM's own Qwen3.5 for text, with `HYBRID` sizes.

    Args:
        folder: where the pair is written.
        tokenizer: a target whose tokenizer it has, and as many tokens; None: no tokenizer.
        sizes: other than those of `HYBRID`.

    """
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    vocabulary = VOCABULARY
    if tokenizer is not None:
        vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    pair = random_pair(folder, Qwen3_5TextConfig(vocab_size=vocabulary, **{**HYBRID, **sizes}))
    if tokenizer is not None:
        for file in tokenizer.glob("*token*"):
            shutil.copy(file, pair.target)
    return pair


def qwen3_next(folder: Path, **sizes: Any) -> Pair:
    """vLLM's own Qwen3-Next with `HYBRID` sizes; experts in its last layer alone."""
    from transformers import Qwen3NextConfig

    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0, 1, 2, 3],
    }
    keys = {**HYBRID, **experts, **sizes}
    return random_pair(folder, Qwen3NextConfig(vocab_size=VOCABULARY, **keys))


def nemotron_h(folder: Path, **sizes: Any) -> Pair:
    """vLLM's own Nemotron-H: Mamba2 layers beside attention without positions, and MLPs."""
    from transformers import NemotronHConfig

    keys: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "layers_block_type": [
            *("linear_attention", "mlp", "linear_attention", "full_attention"),
            *("linear_attention", "mlp", "full_attention", "linear_attention"),
        ],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return random_pair(folder, NemotronHConfig(vocab_size=VOCABULARY, **{**keys, **sizes}))
