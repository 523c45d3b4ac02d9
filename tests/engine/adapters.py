# SPDX-License-Identifier: Apache-2.0
"""Small LoRA adapters of random weights, and targets with an adapter merged into their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

RANK = 4


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of all files of a checkpoint."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def make_adapter(
    folder: Path, target: Path, seed: int, scale: float, lm_head: bool = False
) -> Path:
    """An adapter of all linear layers of a Qwen3 target, in PEFT's format.

    Args:
        folder: to write.
        target: the checkpoint that it is for.
        seed: of its weights.
        scale: of what it adds; 0.1 changes many tokens of the embedded pair's target.
        lm_head: whether it changes the head, too.

    """
    weights = read_weights(target)
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    names = [name for name in weights if name.endswith("_proj.weight")]
    shapes = {name.removesuffix(".weight"): tuple(weights[name].shape) for name in names}
    if lm_head:
        shapes["lm_head"] = tuple(weights["model.embed_tokens.weight"].shape)
    for name, (rows, columns) in shapes.items():
        first = torch.randn(RANK, columns, generator=generator) * columns**-0.5
        second = torch.randn(rows, RANK, generator=generator) * scale * RANK**-0.5
        adapter[f"base_model.model.{name}.lora_A.weight"] = first
        adapter[f"base_model.model.{name}.lora_B.weight"] = second
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(folder: Path, target: Path, adapter: Path) -> Path:
    """The target with an adapter's part added to its weights, in float32."""
    shutil.copytree(target, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = {k: v.float() for k, v in read_weights(target).items()}
    parts = load_file(adapter / "adapter_model.safetensors")
    for name in parts:
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            added = parts[f"{layer}.lora_B.weight"] @ parts[name]
            weights[layer.removeprefix("base_model.model.") + ".weight"] += added
    folder.chmod(0o755)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def no_adapter_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make vLLM's LoRA on the CPU leave rows without an adapter alone.

    It looks up such a row's adapter at index -1, which is the last slot
    (vllm/lora/ops/torch_ops/lora_ops.py). Its kernels for GPUs leave the row out.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def masked(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[indices < 0] = 0

    for module in (lora_ops, punica_cpu):
        monkeypatch.setattr(module, "bgmv_shrink", masked)
