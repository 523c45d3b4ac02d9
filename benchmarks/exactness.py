# SPDX-License-Identifier: Apache-2.0
"""DDTree against the DFlash chain and plain decoding on a GPU: text, acceptance, near-ties.

usage: python benchmarks/exactness.py TARGET DRAFTER --budgets 7 8 15 31 63 --out FOLDER

Every engine answers the same prompts at temperature 0, one request at a time and all at once. Where
DDTree's text leaves the chain's, the target's own gap between its two best logits at that token is
measured, by plain decoding along the text. Only a near-tie excuses a difference: arithmetic in half
precision depends on the shape of the batch. Seeded requests are compared with plain decoding in the
same way. Writes exactness.json and exactness.md.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

from vllm_ddtree.testing.engine import generate, open_engine


def read_prompts(count: int, tokens: int, tokenizer: Any) -> list[list[int]]:
    """Prompts from the Python files of the installed vLLM, `tokens` tokens each."""
    import vllm

    files = sorted(Path(vllm.__path__[0], "v1", "core").rglob("*.py"))
    files += sorted(Path(vllm.__path__[0], "entrypoints").rglob("*.py"))
    prompts = []
    for path in files:
        ids = tokenizer.encode(path.read_text())
        if len(ids) > 4 * tokens:
            start = len(ids) // 3
            prompts.append(ids[start : start + tokens])
        if len(prompts) == count:
            break
    return prompts


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("drafter")
    budget_of = lambda text: text if text == "auto" else int(text)  # noqa: E731
    parser.add_argument("--budgets", type=budget_of, nargs="+", default=[7, 8, 15, 31, 63, "auto"])
    parser.add_argument("--chain", type=int, default=None, help="draft tokens of the chain")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--llm", type=json.loads, default={}, help="JSON of more LLM() arguments")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()

    import torch
    import transformers
    import vllm
    from vllm import SamplingParams

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.target)
    prompts = read_prompts(args.prompts, args.prompt_tokens, tokenizer)
    block_size = json.loads(Path(args.drafter, "config.json").read_text())["block_size"]
    chain_length = args.chain or block_size - 1
    kwargs: dict[str, Any] = {
        "dtype": args.dtype,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "disable_log_stats": False,
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": False,
        **args.llm,
    }
    greedy = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    seeded = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=args.max_tokens, ignore_eos=True)
        for i in range(len(prompts))
    ]
    specs: dict[str, dict[str, Any] | None] = {
        "plain": None,
        f"chain {chain_length}": {
            "method": "dflash",
            "model": args.drafter,
            "num_speculative_tokens": chain_length,
        },
    }
    specs |= {
        f"tree {budget}": {"method": "ddtree", "model": args.drafter, "budget": budget}
        for budget in args.budgets
    }

    results: dict[str, dict[str, Any]] = {}
    for name, spec in specs.items():
        started = time.time()
        with open_engine(args.target, spec, **kwargs) as llm:
            config = llm.llm_engine.vllm_config
            ready = time.time()
            one = [generate(llm, [prompt], greedy) for prompt in prompts]
            rounds = sum(r.counters.num_drafts for r in one)
            accepted = sum(r.counters.num_accepted_tokens for r in one)
            many = generate(llm, prompts, greedy)
            drawn = generate(llm, prompts, seeded)
            results[name] = {
                "graph_mode": str(config.compilation_config.cudagraph_mode),
                "async_scheduling": config.scheduler_config.async_scheduling,
                "start_s": round(ready - started, 1),
                "batch1_tokens": [r.token_ids[0] for r in one],
                "batch_tokens": many.token_ids,
                "seeded_tokens": drawn.token_ids,
                "batch1_rounds": rounds,
                "batch1_acceptance": 1 + accepted / rounds if rounds else 1.0,
                "batch_rounds": many.counters.num_drafts,
                "batch_acceptance": many.counters.acceptance_length,
                "seeded_acceptance": drawn.counters.acceptance_length,
                "batch1_seconds": sum(r.seconds for r in one),
                "batch_seconds": many.seconds,
                "per_position": list(many.counters.per_position),
            }
        print(name, {k: v for k, v in results[name].items() if "tokens" not in k}, flush=True)

    # Where a text leaves its reference: the target's own gap there.
    chain = f"chain {chain_length}"
    comparisons = [
        ("batch1_tokens", chain, "greedy, batch 1, chain"),
        ("batch_tokens", chain, f"greedy, batch {len(prompts)}, chain"),
        ("batch_tokens", "plain", f"greedy, batch {len(prompts)}, plain"),
        ("seeded_tokens", "plain", "seeded 0.8, plain"),
    ]
    differences: list[dict[str, Any]] = []
    for name in specs:
        for key, reference, label in comparisons:
            if name in (reference, "plain"):
                continue
            pairs = zip(results[name][key], results[reference][key], strict=True)
            for index, (got, want) in enumerate(pairs):
                at = first_difference(got, want)
                if at is not None:
                    differences.append(
                        {"run": name, "against": label, "prompt": index, "at": at}
                        | {"got": got[at], "want": want[at], "context": prompts[index] + want[:at]}
                    )
    if differences:
        top2 = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        with open_engine(args.target, None, **kwargs) as llm:
            outputs = generate(llm, [d["context"] for d in differences], top2).outputs
        for difference, output in zip(differences, outputs, strict=True):
            scores = output.outputs[0].logprobs[0]
            ranked = sorted((v.logprob for v in scores.values()), reverse=True)
            difference["gap"] = ranked[0] - ranked[1]
            del difference["context"]
            print(difference, flush=True)

    info = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "arguments": {k: str(v) for k, v in vars(args).items()},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"info": info, "results": results, "differences": differences}
    (args.out / "exactness.json").write_text(json.dumps(report))
    lines = [
        f"vLLM {info['vllm']}, PyTorch {info['torch']}, {info['gpu']}, {args.dtype}",
        "",
        "| engine | graphs | async | acceptance, batch 1 | acceptance, all at once | seeded |"
        " greedy texts equal to the chain's | to plain | seeded equal to plain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in results.items():

        def equal(key: str, other: str, r: dict[str, Any] = r) -> str:
            pairs = list(zip(r[key], results[other][key], strict=True))
            return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"

        lines.append(
            f"| {name} | {r['graph_mode'].split('.')[-1]} | {r['async_scheduling']} "
            f"| {r['batch1_acceptance']:.3f} | {r['batch_acceptance']:.3f} "
            f"| {r['seeded_acceptance']:.3f} | {equal('batch1_tokens', chain)} and "
            f"{equal('batch_tokens', chain)} | {equal('batch_tokens', 'plain')} "
            f"| {equal('seeded_tokens', 'plain')} |"
        )
    lines += ["", "First differences (target's own top-1/top-2 log-prob gap at the token):", ""]
    lines += [
        f"- {d['run']} against {d['against']}: prompt {d['prompt']}, token {d['at']}, "
        f"gap {d['gap']:.4f}"
        for d in differences
    ] or ["none"]
    (args.out / "exactness.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
