# SPDX-License-Identifier: Apache-2.0
"""Whether an inflated pair is still the pair it was made from: texts and acceptance in vLLM.

usage: python -m benchmarks.compare_pairs PAIR/small PAIR/small-dflash OUT/target OUT/drafter

It compares the greedy texts of the two targets, and the acceptance of both pairs' chains on the
same prompts. Where texts differ, it prints the gap between the original target's two best log-probs
at that token. bfloat16 may turn only near-ties, as it does between batch sizes. The exit status is
1 if a difference has a gap above --tie.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.exactness import first_difference
from benchmarks.prompts import python_prompts
from vllm_ddtree.testing.engine import generate, open_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("target", "drafter", "wide_target", "wide_drafter"):
        parser.add_argument(name)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tie", type=float, default=0.25, help="largest gap of a near-tie")
    parser.add_argument("--llm", type=json.loads, default={}, help="JSON of more LLM() arguments")
    args = parser.parse_args()

    import transformers
    from vllm import SamplingParams

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.target)
    prompts = python_prompts(tokenizer, args.prompts, args.prompt_tokens)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    drafts = json.loads(Path(args.drafter, "config.json").read_text())["block_size"] - 1
    kwargs: dict[str, Any] = {
        "dtype": args.dtype,
        "max_model_len": 1024,
        "max_num_seqs": args.prompts,
        "disable_log_stats": False,
        "gpu_memory_utilization": 0.6,
        "enable_prefix_caching": False,
        **args.llm,
    }

    acceptance = []
    for target, drafter in ((args.target, args.drafter), (args.wide_target, args.wide_drafter)):
        spec = {"method": "dflash", "model": drafter, "num_speculative_tokens": drafts}
        with open_engine(target, spec, **kwargs) as llm:
            acceptance.append(generate(llm, prompts, params).counters.acceptance_length)
    with open_engine(args.wide_target, None, **kwargs) as llm:
        wide = generate(llm, prompts, params).token_ids
    with open_engine(args.target, None, **kwargs) as llm:
        small = generate(llm, prompts, params).token_ids
        places = {
            i: at
            for i, (a, b) in enumerate(zip(small, wide, strict=True))
            if (at := first_difference(a, b)) is not None
        }
        gaps: list[float] = []
        if places:
            contexts = [prompts[i] + small[i][:at] for i, at in places.items()]
            best = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
            for output in generate(llm, contexts, best).outputs:
                entries = output.outputs[0].logprobs[0].values()
                scores = sorted((entry.logprob for entry in entries), reverse=True)
                gaps.append(scores[0] - scores[1])

    print(f"texts equal: {len(prompts) - len(places)} of {len(prompts)}")
    for (i, at), gap in zip(places.items(), gaps, strict=True):
        print(f"- prompt {i}, token {at}: the original's two best are {gap:.4f} apart")
    print(f"acceptance of chain {drafts}: {acceptance[0]:.3f}, inflated {acceptance[1]:.3f}")
    sys.exit(max(gaps, default=0.0) > args.tie)


if __name__ == "__main__":
    main()
