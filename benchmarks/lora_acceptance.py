# SPDX-License-Identifier: Apache-2.0
"""What a LoRA adapter on the target does to acceptance, the drafter staying the base's.

An adapter is trained on this repository's documents (the embedded pair was trained on Python code).
Then one CPU engine completes prompts of both kinds, with and without it. What is reported is
accepted tokens a round + 1, by adapter strength: half, as trained, twice (`lora_alpha`).

usage: python -m benchmarks.lora_acceptance [--steps 400] [--folder /tmp/adapters]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from tests.conftest import NANO
from tests.engine.harness import PROMPTS, ddtree, greedy, open_engine

RANK = 8
TOKENS = 48
ROOT = Path(__file__).resolve().parent.parent
STRENGTHS = (0.5, 1.0, 2.0)


def documents() -> str:
    return "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def train(folder: Path, steps: int) -> tuple[float, float]:
    """Train an adapter of all linear layers; loss of held-out text before and after."""
    import torch
    from safetensors.torch import save_file
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(NANO.target, dtype=torch.float32)
    model.requires_grad_(False)
    parts: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}

    def adapt(name: str, layer: nn.Linear) -> None:
        first = nn.Parameter(torch.randn(RANK, layer.in_features) * layer.in_features**-0.5)
        second = nn.Parameter(torch.zeros(layer.out_features, RANK))
        parts[name] = first, second
        layer.register_forward_hook(lambda _, x, y: y + x[0] @ first.T @ second.T)

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith("_proj"):
            adapt(name, layer)
    tokenizer = AutoTokenizer.from_pretrained(NANO.target)
    ids = torch.tensor(tokenizer(documents())["input_ids"])
    cut = len(ids) * 9 // 10
    kept, held = ids[:cut], ids[cut:]

    def batch(text: torch.Tensor, count: int) -> torch.Tensor:
        starts = torch.randint(0, len(text) - 129, (count,))
        return torch.stack([text[i : i + 129] for i in starts.tolist()])

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        logits = model(rows[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    check = batch(held, 24)
    with torch.no_grad():
        before = loss_of(check).item()
    optimizer = torch.optim.AdamW([p for pair in parts.values() for p in pair], lr=2e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = loss_of(batch(kept, 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        after = loss_of(check).item()
    weights = {}
    for name, (first, second) in parts.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = first.detach()
        weights[f"base_model.model.{name}.lora_B.weight"] = second.detach()
    for strength in STRENGTHS:
        out = folder / str(strength)
        out.mkdir(parents=True, exist_ok=True)
        save_file(weights, out / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": RANK * strength,
            "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in parts}),
        }
        (out / "adapter_config.json").write_text(json.dumps(config))
    return before, after


def prompts() -> dict[str, list[str]]:
    """Prompts of both kinds: code, and the beginnings of paragraphs of the documents."""
    paragraphs = [p for p in documents().split("\n\n") if len(p) > 200 and p[0].isalpha()]
    return {"code": list(PROMPTS), "documents": [p[:80] for p in paragraphs[::4][:12]]}


def measure(folder: Path) -> list[tuple[str, str, float, float]]:
    """(prompts, adapter, acceptance length, share of tokens as without the adapter)."""
    from vllm.lora.request import LoRARequest

    rows = []
    engine: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
    with open_engine(NANO.target, ddtree(NANO, 15), **DETAILS, **engine) as llm:
        for kind, texts in prompts().items():
            base: list[list[int]] = []
            for strength in (0.0, *STRENGTHS):
                lora = None
                if strength:
                    number = STRENGTHS.index(strength) + 1
                    lora = LoRARequest(str(strength), number, str(folder / str(strength)))
                outputs = llm.generate(texts, greedy(TOKENS), use_tqdm=False, lora_request=lora)
                samples = [output.outputs[0] for output in outputs]
                tokens = [list(sample.token_ids) for sample in samples]
                base = base or tokens
                counts = [sample.spec_decode_metrics.per_step_accepted for sample in samples]
                rounds = [accepted for request in counts for accepted in request]
                same = sum(
                    a == b
                    for x, y in zip(base, tokens, strict=True)
                    for a, b in zip(x, y, strict=True)
                )
                share = same / sum(map(len, tokens))
                name = str(strength) if strength else "none"
                rows.append((kind, name, 1 + sum(rounds) / len(rounds), share))
    return rows


DETAILS: dict[str, Any] = {
    "per_request_spec_decode_metrics": "detailed",
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 16,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/adapters"))
    args = parser.parse_args()
    before, after = train(args.folder, args.steps)
    print(f"loss of held-out documents: {before:.3f} without the adapter, {after:.3f} with it")
    print("| prompts | adapter's strength | acceptance length | tokens as without it |")
    print("|---|---|---|---|")
    for kind, name, length, share in measure(args.folder):
        print(f"| {kind} | {name} | {length:.2f} | {share:.0%} |")


if __name__ == "__main__":
    main()
