# SPDX-License-Identifier: Apache-2.0
"""What a round costs on a target of Kimi-K2.6's dimensions, in milliseconds, by budget and load.

usage: python -m benchmarks.kimi_shape --out FOLDER [--layers 8] [--tensor-parallel 1]
           [--arms plain chain-7 auto tree-7 tree-15 tree-31 tree-63] [--concurrency 1 8 32]
           [--expert-parallel] [--configs-only]

Target and drafter have the published dimensions and random weights (`load_format: dummy`): experts
INT4 in groups of 32, as published, and fewer layers where the GPUs do not hold 61. Each arm is an
engine of its own, one after the other. `auto` logs the table of costs that it measures at start.

A round's time is the time between a request's first and last token over its rounds; all requests of
a load start together and write as many tokens. With random weights texts and acceptance mean
nothing; with all requests alike, no expert is chosen by what it knows either. Writes
kimi_shape.json, kimi_shape.md and one log of each engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.engine_process import EngineProcess

VOCAB = 163840
DENSE = r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"
TARGET: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "group_size": 32,
                    "strategy": "group",
                    "symmetric": True,
                    "dynamic": False,
                    "actorder": None,
                    "block_structure": None,
                    "observer": "minmax",
                    "observer_kwargs": {},
                },
            }
        },
        "ignore": ["lm_head", r"re:.*self_attn.*", r"re:.*shared_experts.*", DENSE],
    },
}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 7168,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 18432,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "torch_dtype": "bfloat16",
    "block_size": 8,
}
TARGET_LAYERS = (1, 12, 24, 35, 47, 58)
"""Of 61 that the drafter reads."""


def write_configs(folder: Path, layers: int) -> tuple[Path, Path]:
    """Folders of target and drafter, with config.json alone."""
    ids = sorted({round(layer * (layers - 1) / 60) for layer in TARGET_LAYERS})
    # As many states as published, so that the drafter's `fc` has its size.
    for layer in range(layers):
        if len(ids) < min(layers, len(TARGET_LAYERS)) and layer not in ids:
            ids.append(layer)
    drafter = {
        **DRAFTER,
        "num_target_layers": layers,
        "layer_types": ["full_attention"] * DRAFTER["num_hidden_layers"],
        "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": sorted(ids)},
    }
    for name, config in (("target", {**TARGET, "num_hidden_layers": layers}), ("drafter", drafter)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))
    return folder / "target", folder / "drafter"


def speculation(arm: str, drafter: Path) -> dict[str, Any] | None:
    """The speculative_config of an arm."""
    kind, _, number = arm.partition("-")
    if kind == "plain":
        return None
    if kind == "chain":
        return {
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": int(number),
        }
    return {
        "method": "ddtree",
        "model": str(drafter),
        "budget": "auto" if kind == "auto" else int(number),
    }


@contextlib.contextmanager
def opened(log: str, arguments: dict[str, Any]) -> Iterator[Any]:
    """An engine whose process writes to `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from vllm import LLM

    yield LLM(**arguments)


def counted(llm: Any, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def measure(llm: Any, requests: int, tokens: int, prompt: int, seed: int) -> dict[str, float]:
    """One load: milliseconds a round, and what was accepted."""
    import numpy as np
    from vllm import SamplingParams

    rng = np.random.default_rng(seed)
    prompts = [
        {"prompt_token_ids": rng.integers(1000, VOCAB - 1000, prompt).tolist()}
        for _ in range(requests)
    ]
    name = "vllm:spec_decode_num_drafts"
    before = counted(llm, name)
    outputs = llm.generate(
        prompts,
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    drafts = (counted(llm, name) - before) / requests
    rounds = drafts or tokens - 1
    seconds = statistics.median(
        output.metrics.last_token_ts - output.metrics.first_token_ts for output in outputs
    )
    return {
        "ms_per_round": 1000 * seconds / rounds,
        "rounds": rounds,
        "tokens_per_round": (tokens - 1) / rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true")
    arms = ["plain", "chain-7", "auto", "tree-7", "tree-15", "tree-31", "tree-63"]
    parser.add_argument("--arms", nargs="+", default=arms)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--configs-only", action="store_true", help="write the two config.json")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    target, drafter = write_configs(args.out, args.layers)
    if args.configs_only:
        return
    results: list[dict[str, Any]] = []
    for arm in args.arms:
        arguments = {
            "model": str(target),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 4096,
            "max_num_seqs": max(args.concurrency),
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": False,
            "tensor_parallel_size": args.tensor_parallel,
            "enable_expert_parallel": args.expert_parallel,
            "disable_log_stats": False,
            "speculative_config": speculation(arm, drafter),
        }
        with EngineProcess(opened, str(args.out / f"{arm}.log"), arguments) as engine:
            try:
                engine.open()
                engine.call(measure, max(args.concurrency), 8, args.prompt, 0)
                for requests in args.concurrency:
                    runs = [
                        engine.call(measure, requests, args.tokens, args.prompt, repeat + 1)
                        for repeat in range(args.repeats)
                    ]
                    times = [run["ms_per_round"] for run in runs]
                    row = {"arm": arm, "requests": requests, "median": statistics.median(times)}
                    results.append({**row, "runs": runs})
                    print(row, flush=True)
            except RuntimeError as error:
                print(f"{arm}: {error}", flush=True)
        report = {"layers": args.layers, "tensor_parallel": args.tensor_parallel, "runs": results}
        (args.out / "kimi_shape.json").write_text(json.dumps(report, indent=1))
    (args.out / "kimi_shape.md").write_text(table_of(results, args.concurrency))


def table_of(results: list[dict[str, Any]], loads: list[int]) -> str:
    """Markdown: milliseconds a round, an arm a line."""
    by_arm: dict[str, dict[int, float]] = {}
    for row in results:
        by_arm.setdefault(row["arm"], {})[row["requests"]] = row["median"]
    lines = ["| requests | " + " | ".join(map(str, loads)) + " |", "|---" * (len(loads) + 1) + "|"]
    for arm, times in by_arm.items():
        cells = (f"{times[load]:.2f}" if load in times else "" for load in loads)
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
