# SPDX-License-Identifier: Apache-2.0
"""A soak: thousands of mixed requests, aborts and bad requests through engines short of KV blocks.

usage: python -m benchmarks.soak TARGET DRAFTER --requests 10000 --out FOLDER

The engines of --engines live one after another (vLLM's AsyncLLM: engine core in its own process,
asynchronous scheduling, CUDA graphs) and share the requests. An engine's requests come in segments.
After each segment the engine is quiet; then memory is read, and every KV block must be free. At the
end some of the finished requests run again: some on the same engine, one at a time, and some on an
engine without speculation. They must give the same tokens, or differ in a choice that rounding
explains (benchmarks/soak_judge.py).

Writes soak.json and soak.md. Exits with 1, and says why, unless
- every request ended as it should: finished as its parameters say, aborted, or, if it was wrong,
  refused with an error of its own;
- no engine died, and none stood still for --stall seconds;
- requests were preempted and aborted;
- KV blocks were all free and memory did not grow, on the GPU and on the host;
- of the requests that ran again, none differed by a gap larger than --tie logits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import soak_judge
from benchmarks.serve_load import speculation
from benchmarks.soak_driver import Driver, Outcome
from benchmarks.soak_report import write
from benchmarks.soak_requests import Request, Requests
from vllm_ddtree.testing import testbed

SCHEDULE = [[1, 4, 31], [5, 12, 15], [13, 20, 7], [21, 256, 3]]
SPECS = {"tree-schedule": {"method": "ddtree", "budget_per_batch_size": SCHEDULE}}


@dataclass
class Difference:
    """Where a request's second run left its first."""

    engine: str
    against: str
    request: Request
    sample: int
    at: int
    got: int
    want: int
    context: list[int]
    gap: float = float("nan")


def compare(
    first: Outcome, second: Outcome, engine: str, against: str
) -> tuple[list[Difference], list[str], list[float]]:
    """Where the runs differ, what no rounding explains, and how far their logprobs are apart.

    The logprobs are those of the tokens up to the first difference: rounding alone.
    """
    request, found, wrong, apart = first.request, [], [], []
    if second.status != "finished":
        return [], [f"{request.name} alone: {second.status}, {second.error}"], []
    for index, (one, two) in enumerate(zip(first.samples, second.samples, strict=True)):
        at = soak_judge.first_difference(one.token_ids, two.token_ids)
        # A stop string ends a text inside a round, and vLLM keeps the tokens of the whole round.
        same = one.text == two.text and one.finish_reason == two.finish_reason
        same = same and ("stop" in request.params or one.token_ids == two.token_ids)
        if one.logprobs and two.logprobs:
            pairs = list(zip(one.logprobs, two.logprobs, strict=False))[:at]
            apart += [abs(a - b) for a, b in pairs]
        if at is None:
            if not same:
                wrong.append(f"{request.name} alone: the same tokens, another end")
            continue
        context = request.prompt + one.token_ids[:at]
        tokens = one.token_ids[at], two.token_ids[at]
        found.append(Difference(engine, against, request, index, at, *tokens, context))
    return found, wrong, apart


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Least-squares slope of (requests, MiB), in MiB a 1000 requests."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 1000 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def growth(readings: Sequence[tuple[int, dict[str, float]]], key: str) -> float:
    """MiB from the end of the first third of the readings (caches fill until then) to the last."""
    values = [reading[key] for _, reading in readings]
    return values[-1] - max(values[: len(values) // 3 + 1])


def engine_arguments(args: argparse.Namespace, spec: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs."""
    keys: dict[str, Any] = {
        "model": args.target,
        "speculative_config": spec,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_seqs * 64,
        "block_size": args.block_size,
        "num_gpu_blocks_override": args.blocks,
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": True,
        "worker_extension_cls": "benchmarks.soak_worker.SoakWorker",
        "seed": 0,
    }
    if testbed() is not None:
        keys |= {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    return {**keys, **args.llm}


def make_engine(keys: dict[str, Any]) -> Any:
    """An AsyncLLM."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**keys))


def counters() -> dict[str, float]:
    """vLLM's counters of the present engine that the report shows."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    names = [
        "num_preemptions",
        "prefix_cache_hits",
        "generation_tokens",
        "spec_decode_num_drafts",
        "spec_decode_num_accepted_tokens",
    ]
    values: Counter[str] = Counter()
    for metric in get_metrics_snapshot():
        name = metric.name.removeprefix("vllm:")
        if name in names:
            values[name] += metric.value
    return dict(values)


async def soak_engine(
    name: str, count: int, requests: Requests, args: argparse.Namespace, report: dict[str, Any]
) -> tuple[list[Outcome], list[Difference]]:
    """One engine's share of the soak, recorded in `report`."""
    spec, _ = speculation(name, args.drafter, SPECS)
    started = time.monotonic()
    keys = engine_arguments(args, spec)
    engine = make_engine(keys)
    ready = time.monotonic()
    driver = Driver(engine, args.max_model_len, requests.eos, args.stall)
    failures: list[str] = report["failures"]
    outcomes: list[Outcome] = []
    readings: list[tuple[int, dict[str, float]]] = []
    pairs: list[tuple[Outcome, Outcome]] = []
    try:
        for segment in range(args.segments):
            share = count * (segment + 1) // args.segments - count * segment // args.segments
            drawn = [requests.draw() for _ in range(share)]
            outcomes += await driver.run(drawn, args.concurrency)
            if not await driver.all_free():
                failures.append(f"{name}: KV blocks in use after {len(outcomes)} requests")
            readings.append((len(outcomes), await driver.memory()))
        served = time.monotonic()
        counted = counters()
        pairs = await driver.again(pick(outcomes), "alone", args.alone_seconds)
        if not await driver.all_free():
            failures.append(f"{name}: KV blocks in use at the end")
    except Exception as error:
        failures.append(f"{name}: {type(error).__name__}: {error}")
        return outcomes, []
    finally:
        engine.shutdown()

    differences, wrong, apart = [], [], []
    for first, second in pairs:
        found, bad, far = compare(first, second, name, "alone")
        differences += found
        wrong += bad
        apart += far
    statuses = Counter(outcome.status for outcome in outcomes)
    refused = Counter(o.request.wrong for o in outcomes if o.status == "refused")
    memory = {
        key: {
            "first": readings[0][1][key],
            "last": readings[-1][1][key],
            "growth": growth(readings, key),
            "slope": slope([(n, reading[key]) for n, reading in readings]),
        }
        for key in readings[0][1]
    }
    rounds = counted.get("spec_decode_num_drafts", 0)
    report["engines"][name] = {
        "start_s": ready - started,
        "serve_s": served - ready,
        "statuses": dict(statuses),
        "refused": dict(refused),
        "tokens": sum(len(s.token_ids) for o in outcomes for s in o.samples),
        "counters": counted,
        "acceptance": 1 + counted.get("spec_decode_num_accepted_tokens", 0) / max(1, rounds),
        "memory_mib": memory,
        "readings": readings,
        "alone": len(pairs),
        "alone_differ": len({d.request.name for d in differences}),
        "logprobs_compared": len(apart),
        "logprob_apart_max": max(apart, default=0.0),
    }
    failures += [f"{name}: {line}" for line in wrong]
    failures += engine_failures(name, outcomes, count, counted, memory, len(pairs), args)
    return outcomes, differences


def engine_failures(
    name: str,
    outcomes: Sequence[Outcome],
    count: int,
    counted: dict[str, float],
    memory: dict[str, dict[str, float]],
    alone: int,
    args: argparse.Namespace,
) -> list[str]:
    """What an engine's share of the soak must show, and did not."""
    found = [f"{o.request.name}: {o.error}" for o in outcomes if o.status == "failed"]
    found += [f"{o.request.name}: {line}" for o in outcomes for line in o.faults]
    names = {outcome.request.name for outcome in outcomes}
    if len(outcomes) != count or len(names) != count:
        found.append(f"{len(outcomes)} outcomes of {len(names)} requests, {count} sent")
    for status in ("finished", "aborted", "refused"):
        if not any(outcome.status == status for outcome in outcomes):
            found.append(f"no request was {status}")
    if not counted.get("num_preemptions"):
        found.append("no preemption")
    if alone < args.min_again:
        found.append(f"only {alone} requests ran again")
    for key, limit in (("allocated", args.gpu_slack), ("host", args.host_slack)):
        if key in memory and memory[key]["growth"] > limit:
            found.append(f"memory ({key}) grew by {memory[key]['growth']:.1f} MiB")
    return [f"{name}: {line}" for line in found]


def pick(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The finished requests that a second run must repeat, in random order."""
    chosen = [o for o in outcomes if o.status == "finished" and o.request.repeatable]
    random.Random(1).shuffle(chosen)
    return chosen


async def soak_plain(
    outcomes: dict[str, list[Outcome]],
    differences: list[Difference],
    eos: int,
    args: argparse.Namespace,
    report: dict[str, Any],
) -> None:
    """The engine without speculation: the same requests alone, and the logits of differences."""
    keys = engine_arguments(args, None)
    keys |= {"logprobs_mode": "raw_logits", "max_logprobs": -1}
    keys.pop("num_gpu_blocks_override")
    engine = make_engine(keys)
    driver = Driver(engine, args.max_model_len, eos, args.stall)
    failures: list[str] = report["failures"]
    try:
        for name, own in outcomes.items():
            # Not those that ran alone just now.
            chosen = pick(own)[::-1]
            seconds = args.plain_seconds / len(outcomes)
            pairs = await driver.again(chosen, "plain", seconds)
            found, wrong = [], []
            for first, second in pairs:
                parts = compare(first, second, name, "plain")
                found += parts[0]
                wrong += parts[1]
            failures += [f"{name} against plain: {line}" for line in wrong]
            if len(pairs) < args.min_again:
                failures.append(f"{name}: only {len(pairs)} requests ran again without speculation")
            report["engines"][name]["plain"] = len(pairs)
            report["engines"][name]["plain_differ"] = len({d.request.name for d in found})
            differences += found
        logits = await driver.watch(asyncio.gather(*(last_logits(driver, d) for d in differences)))
    except Exception as error:
        failures.append(f"plain: {type(error).__name__}: {error}")
        return
    finally:
        engine.shutdown()
    for difference, row in zip(differences, logits, strict=True):
        difference.gap = judge(difference, row)


async def last_logits(driver: Driver, difference: Difference) -> Any:
    """Logits [V] after a difference's common text."""
    import numpy as np
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    d = difference
    name = f"{d.request.name}-{d.engine}-{d.against}-{d.sample}"
    output = await driver.last_output(d.context, params, name)
    row = output.outputs[0].logprobs[0]
    logits = np.full(max(row) + 1, -np.inf)
    for token, value in row.items():
        logits[token] = value.logprob
    return logits


def judge(difference: Difference, raw: Any) -> float:
    """A difference's gap, in logits."""
    request, d = difference.request, difference
    text = d.context[len(request.prompt) :]
    logits = soak_judge.processed(raw, request.params, request.prompt, text)
    noise = 0.0
    if request.params["temperature"]:
        seed, position = request.seed(d.sample), len(d.context) - 1
        noise = soak_judge.noise_difference(d.got, d.want, len(logits), seed, position)
    return soak_judge.gap(logits, request.params, d.got, d.want, noise)


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    """The whole soak; its report."""
    import torch
    import transformers
    import vllm

    from benchmarks.prompts import python_prompts

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.target)
    config = json.loads(Path(args.target, "config.json").read_text())
    windows = python_prompts(tokenizer, args.windows, args.max_model_len)
    requests = Requests(
        # vLLM's text of an answer repeats a prompt that ends inside a character.
        [window for window in windows if tokenizer.decode(window).isascii()],
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        args.max_model_len,
        config["vocab_size"],
        config["eos_token_id"],
        abort_within=args.abort_within,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    gpu = torch.cuda.is_available()
    info = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": "GPU" if gpu else platform.processor() or "CPU",
        "arguments": {key: str(value) for key, value in vars(args).items()},
    }
    report: dict[str, Any] = {"info": info, "engines": {}, "differences": [], "failures": []}
    report["tie"] = args.tie
    outcomes: dict[str, list[Outcome]] = {}
    differences: list[Difference] = []
    for index, name in enumerate(args.engines):
        share = args.requests * (index + 1) // len(args.engines)
        share -= args.requests * index // len(args.engines)
        own, found = await soak_engine(name, share, requests, args, report)
        differences += found
        if name in report["engines"]:
            outcomes[name] = own
            print(name, {k: v for k, v in report["engines"][name].items() if k != "readings"})
        write(report, args.out, judged=False)
    await soak_plain(outcomes, differences, requests.eos, args, report)
    for d in differences:
        found_in: dict[str, Any] = {
            "engine": d.engine,
            "against": d.against,
            "request": d.request.name,
        }
        found_in |= {"params": d.request.params, "at": d.at, "got": d.got, "want": d.want}
        report["differences"].append({**found_in, "gap": d.gap})
        if not d.gap <= args.tie:
            report["failures"].append(
                f"{d.engine} against {d.against}: {d.request.name} differs at token {d.at} by a "
                f"gap of {d.gap:.3f} logits: {d.request.params}"
            )
    if gpu:
        info["gpu"] = torch.cuda.get_device_name()
    write(report, args.out, judged=True)
    return report


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    on_cpu = testbed() is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("target")
    add("drafter")
    add("--engines", nargs="+", default=["tree-auto", "tree-schedule", "tree-31"])
    add("--requests", type=int, default=10_000, help="of all engines together")
    add("--concurrency", type=int, default=64)
    add("--segments", type=int, default=8, help="quiet moments of an engine")
    add("--max-tokens", type=int, default=200)
    add("--abort-within", type=float, default=1.0, help="seconds")
    add("--alone-seconds", type=float, default=10, help="of an engine's requests run again")
    add("--plain-seconds", type=float, default=24, help="of all engines', without speculation")
    add("--min-again", type=int, default=50, help="fewest of them")
    add("--stall", type=float, default=30, help="seconds without an answer that are a hang")
    add("--tie", type=float, default=None, help="largest gap, logits; bfloat16: 0.5")
    add("--gpu-slack", type=float, default=16, help="MiB that live tensors may grow by")
    add("--host-slack", type=float, default=64, help="MiB that the engine's process may grow by")
    add("--dtype", default="float32" if on_cpu else "bfloat16")
    add("--max-model-len", type=int, default=1024)
    add("--max-num-seqs", type=int, default=32)
    add("--block-size", type=int, default=32 if on_cpu else 16)
    add("--blocks", type=int, default=320, help="KV blocks of an engine")
    add("--windows", type=int, default=64, help="texts that prompts are cut from")
    add("--llm", type=json.loads, default={}, help="JSON of more engine arguments")
    add("--seed", type=int, default=0)
    add("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.tie is None:
        # Logits of 16 to 32 are 0.125 apart in bfloat16.
        args.tie = 1e-3 if args.dtype == "float32" else 0.5
    for name in args.engines:
        try:
            speculation(name, args.drafter, SPECS)
        except ValueError as error:
            parser.error(str(error))
    return args


def main() -> None:
    if bed := testbed():
        bed.prepare()
    args = parse()
    report = asyncio.run(soak(args))
    print((args.out / "soak.md").read_text())
    raise SystemExit(1 if report["failures"] else 0)


if __name__ == "__main__":
    main()
