# SPDX-License-Identifier: Apache-2.0
"""Plain decoding, the DFlash chain and DDTree under load: one command, one machine, same prompts.

usage: python -m benchmarks.serve_load TARGET DRAFTER --engines plain chain-15 tree-31 --out FOLDER
       python -m benchmarks.serve_load TARGET --server URL ... --label NAME ... --out FOLDER
       python -m benchmarks.serve_load --merge A/load.json B/load.json --out FOLDER

An engine is `plain`, `chain-K` (vLLM's own method for the drafter, K draft tokens),
`chain-K-adaptive` (the same with vLLM 0.33's enable_adaptive_verification), `tree-B` (method
ddtree, budget B), `unary-B` (the same with "conditional": false), `tree-auto`, or a name that
--specs gives a speculative_config. Its core is vLLM's usual process of its own (--in-process: this
one).

One engine lives at a time. It serves every concurrency, then everything again for the next repeat.
--cycles repeats the whole list of engines, so that a drifting machine shows. With --together all
engines live side by side, each with the share of memory that --gpu-memory-utilization gives, and
take turns at each concurrency while the others wait.

At concurrency N, N requests are in flight: a new one is submitted as soon as one is answered.
Requests are greedy, have exactly --max-tokens tokens each, and use no prefix caching. Every engine
gets the same prompts, every repeat gets others. A short run at the same concurrency goes before
each measured one. --traffic names what requests are about and how they are sampled
(benchmarks/traffic.py); with --sampling everything runs a second time, sampled.

With --seconds a run lasts so long instead of so many requests, and its requests have between half
and one and a half times --max-tokens, so that they do not end together. With --phases a load that
changes while it runs comes last: SECONDS:REQUESTS:TRAFFIC ... (benchmarks/changing.py).

Writes load.json and load.md after each run, so that a benchmark cut short leaves what it measured.
benchmarks/report.py says what the numbers are. Its column "best static" names the best engine whose
setting does not follow the load, at that load; 1 less the ratio to it is the regret.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import changing, report
from benchmarks.changing import Phase, Timeline, parse_phase
from benchmarks.engine_process import EngineProcess
from benchmarks.prompts import dataset_prompts, file_prompts, python_prompts
from benchmarks.traffic import TRAFFIC, traffic_prompts

if TYPE_CHECKING:
    from vllm import LLM

WARM_UP_TOKENS = 24
SETTLE = 0.5
"""Seconds of a timed run that come before those which count."""
_request_ids = itertools.count()


def speculation(
    name: str, drafter: str, specs: dict[str, Any]
) -> tuple[dict[str, Any] | None, int]:
    """speculative_config of an engine's name and its rows a request in a verify step.

    Rows are 0 where the name does not tell. Raises ValueError for a name that is none.
    """
    if name in specs:
        return {"model": drafter, **specs[name]}, 0
    kind, _, number = name.removesuffix("-adaptive").partition("-")
    adaptive = name.endswith("-adaptive")
    if name == "plain":
        return None, 1
    if kind == "chain" and number.isdecimal():
        spec: dict[str, Any] = {"method": chain_method(drafter), "model": drafter}
        spec["num_speculative_tokens"] = int(number)
        if adaptive:
            spec["enable_adaptive_verification"] = True
        return spec, int(number) + 1
    if kind in ("tree", "unary") and number.isdecimal() and not adaptive:
        spec = {"method": "ddtree", "model": drafter, "budget": int(number)}
        return spec | ({"conditional": False} if kind == "unary" else {}), int(number) + 1
    if name == "tree-auto":
        return {"method": "ddtree", "model": drafter, "budget": "auto"}, 0
    raise ValueError(
        f"engine {name!r}: give plain, chain-K, chain-K-adaptive, tree-B, unary-B, "
        "tree-auto or a key of --specs"
    )


def chain_method(drafter: str) -> str:
    """vLLM's method for the chain of a drafter, a folder."""
    path = Path(drafter) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    dspark = config.get("speculators_model_type") == "dspark" or any(
        "DSpark" in architecture for architecture in config.get("architectures", [])
    )
    return "dspark" if dspark else "dflash"


def engine_steps(llm: LLM) -> int:
    """Steps of the engine that gave output, since its start."""
    name = "vllm:iteration_tokens_total"
    return sum(metric.count for metric in llm.get_metrics() if metric.name == name)


def drive(
    llm: LLM,
    prompts: Sequence[list[int]],
    max_tokens: int,
    concurrency: int,
    name: str,
    sampling: dict[str, Any] | None = None,
    traffic: str = "",
) -> report.Run:
    """All prompts through the engine, `concurrency` at a time; the run's record."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from vllm_ddtree.testing.engine import Counters

    params = SamplingParams(
        **{"temperature": 0, **(sampling or {})},
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine = llm.llm_engine
    before, steps = Counters.read(llm), engine_steps(llm)
    todo = iter(prompts)

    def submit(count: int) -> None:
        for prompt in itertools.islice(todo, count):
            request = f"load-{next(_request_ids)}"
            engine.add_request(request, {"prompt_token_ids": prompt}, params)

    outputs = []
    start = time.perf_counter()
    submit(concurrency)
    while engine.has_unfinished_requests():
        finished = [output for output in engine.step() if output.finished]
        submit(len(finished))
        outputs += finished
    seconds = time.perf_counter() - start
    requests = [
        (
            len(output.outputs[0].token_ids),
            output.metrics.first_token_latency,
            output.metrics.last_token_ts - output.metrics.first_token_ts,
        )
        for output in outputs
    ]
    counted = Counters.read(llm).since(before)
    return report.run_record(
        name,
        concurrency,
        seconds,
        requests,
        drafts=counted.num_drafts,
        accepted=counted.num_accepted_tokens,
        steps=engine_steps(llm) - steps,
        traffic=traffic,
    )


def drive_phases(
    llm: LLM,
    prompts: Mapping[str, Sequence[list[int]]],
    phases: Sequence[Phase],
    max_tokens: int,
    seed: int,
) -> tuple[Timeline, dict[str, int]]:
    """A changing load through the engine.

    Args:
        llm: the engine.
        prompts: of each traffic, taken in turn.
        phases: of the load.
        max_tokens: mean length of an answer; lengths lie between half and one and a half of it.
        seed: of the lengths; the same for every engine.

    Returns:
        Its timeline, and what the engine counted: drafts, accepted, steps.

    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from vllm_ddtree.testing.engine import Counters

    engine, rng = llm.llm_engine, random.Random(seed)
    queues = {traffic: itertools.cycle(own) for traffic, own in prompts.items()}

    def submit(traffic: str) -> str:
        params = SamplingParams(
            **{"temperature": 0, **sampling_of(traffic)},
            max_tokens=rng.randint(max(1, max_tokens // 2), max_tokens + max_tokens // 2),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        request = f"load-{next(_request_ids)}"
        engine.add_request(request, {"prompt_token_ids": next(queues[traffic])}, params)
        return request

    timeline = Timeline(phases)
    before, steps = Counters.read(llm), engine_steps(llm)
    changing.drive_phases(
        engine, timeline, submit, time.perf_counter, lambda out: len(out.outputs[0].token_ids)
    )
    counted = Counters.read(llm).since(before)
    return timeline, {
        "drafts": counted.num_drafts,
        "accepted": counted.num_accepted_tokens,
        "steps": engine_steps(llm) - steps,
    }


def sampling_of(traffic: str) -> dict[str, Any]:
    """SamplingParams of a traffic; none for the prompts of --prompts and --dataset."""
    return TRAFFIC[traffic].sampling if traffic else {}


def drive_seconds(
    llm: LLM,
    prompts: Sequence[list[int]],
    seconds: float,
    concurrency: int,
    max_tokens: int,
    name: str,
    traffic: str,
    seed: int,
) -> report.Run:
    """A steady load for so many seconds, after `SETTLE`, which does not count; the run's record."""
    phases = [Phase(SETTLE, concurrency, traffic), Phase(seconds, concurrency, traffic)]
    timeline, counts = drive_phases(llm, {traffic: prompts}, phases, max_tokens, seed)
    return report.timed_record(
        name, traffic, concurrency, seconds, timeline.by_phase[1], timeline.seconds, **counts
    )


def num_requests(concurrency: int, args: argparse.Namespace) -> int:
    """Requests of one run."""
    return max(args.min_requests, args.waves * concurrency)


def read_prompts(args: argparse.Namespace, traffic: str = "") -> list[list[list[int]]]:
    """Prompts of each repeat of each cycle, of a traffic or of what the arguments name."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.target)
    each = num_requests(max([*args.concurrency, *(phase.requests for phase in args.phases)]), args)
    sets = args.repeats * args.cycles
    if traffic:
        flat = traffic_prompts(tokenizer, traffic, each * sets, args.prompt_tokens, args.seed)
    elif args.dataset:
        flat = dataset_prompts(tokenizer, each * sets, args.dataset)
    elif args.prompts:
        flat = file_prompts(tokenizer, each * sets, args.prompts)
    else:
        flat = python_prompts(tokenizer, each * sets, args.prompt_tokens, args.seed)
    return [flat[i * each : (i + 1) * each] for i in range(sets)]


def all_prompts(args: argparse.Namespace) -> dict[str, list[list[list[int]]]]:
    """`read_prompts` of each traffic that runs; "" is what the arguments name."""
    names = [*(args.traffic or [""]), *(phase.traffic for phase in args.phases)]
    return {name: read_prompts(args, name) for name in dict.fromkeys(names)}


def loads_of(args: argparse.Namespace) -> list[tuple[str, dict[str, Any] | None, int, str]]:
    """(traffic's name in the record, SamplingParams, concurrency, traffic of the prompts)."""
    loads: list[tuple[str, dict[str, Any] | None, int, str]] = [
        (name, sampling_of(name), n, name)
        for name in args.traffic or [""]
        for n in args.concurrency
    ]
    if args.sampling:
        counts = args.sampling_concurrency or args.concurrency
        loads += [("sampled", args.sampling, n, "") for n in counts]
    return loads


def llm_arguments(args: argparse.Namespace, name: str, rows: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one engine."""
    kwargs: dict[str, Any] = {
        "dtype": args.dtype,
        "max_num_seqs": args.max_num_seqs
        or max([*args.concurrency, *(phase.requests for phase in args.phases)]),
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
    }
    if not args.prompts and not args.dataset:
        kwargs["max_model_len"] = args.prompt_tokens + 3 * args.max_tokens // 2 + 256
    kwargs |= args.llm
    kwargs |= args.engine_llm.get(name, {})
    if args.capture_requests and rows:
        sizes = [n * rows for n in args.capture_requests]
        own = kwargs.get("compilation_config") or {}
        kwargs["compilation_config"] = {**own, "cudagraph_capture_sizes": sizes}
    return kwargs


def print_run(run: report.Run) -> None:
    print({k: v if isinstance(v, str) else round(v, 3) for k, v in run.items()}, flush=True)


def machine() -> dict[str, Any]:
    """Versions and device."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    # Not torch.cuda: once it is set up here, vLLM cannot fork its engine and starts it slowly.
    gpu = current_platform.get_device_name()
    return {"gpu": gpu, "vllm": vllm.__version__, "torch": torch.__version__}


def describe(llm: LLM) -> dict[str, Any]:
    """What a report says of an engine."""
    config = llm.llm_engine.vllm_config
    compilation = config.compilation_config
    return {
        "graphs": str(compilation.cudagraph_mode).rsplit(".", 1)[-1],
        "largest graph": max(compilation.cudagraph_capture_sizes or [0]),
        "async": config.scheduler_config.async_scheduling,
    }


def engine_process(args: argparse.Namespace, name: str) -> EngineProcess:
    """The process of an engine that is not open yet."""
    from vllm_ddtree.testing.engine import open_engine

    spec, rows = speculation(name, args.drafter, args.specs)
    return EngineProcess(open_engine, args.target, spec, **llm_arguments(args, name, rows))


def start(engine: EngineProcess, name: str, out: dict[str, Any]) -> None:
    began = time.perf_counter()
    engine.open()
    seconds = round(time.perf_counter() - began, 1)
    out["engines"][name] = {**engine.call(describe), "start s": seconds}
    print(name, out["engines"][name], flush=True)


def start_all(
    engines: dict[str, EngineProcess], args: argparse.Namespace, out: dict[str, Any]
) -> None:
    """One by one, as an engine measures its memory. At once if it is told how much to take, but for
    those that measure their rounds. With --at-once those, too: they measure when the others, which
    have fewer graphs to capture, are ready."""
    if "kv_cache_memory_bytes" not in args.llm:
        rounds = [[name] for name in engines]
    elif args.at_once:
        rounds = [list(engines)]
    else:
        timed = [name for name in engines if name.endswith("auto") or name in args.specs]
        rounds = [[n for n in engines if n not in timed]] + [[name] for name in timed]
    for names in filter(None, rounds):
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: start(engines[name], name, out), names))


def load_engines(args: argparse.Namespace, out: dict[str, Any]) -> None:
    """Measures every engine into `out`: cycle by cycle, or turn by turn if they live together."""
    prompts = all_prompts(args)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def time_is_up(what: str) -> bool:
        up = bool(args.time_limit) and time.perf_counter() - began > args.time_limit
        if up:
            print(f"time is up: {what} left out", flush=True)
        return up

    def turns(engines: dict[str, EngineProcess], repeat: int) -> list[str]:
        names = list(engines)
        first = repeat % len(names)  # nobody is always the first
        return names[first:] + names[:first]

    def serve(engines: dict[str, EngineProcess], cycle: int) -> None:
        for repeat in range(args.repeats):
            place = cycle * args.repeats + repeat
            for record, sampling, n, traffic in loads_of(args):
                chosen = prompts[traffic][place][: num_requests(n, args)]
                for name in turns(engines, repeat):
                    if time_is_up(f"{name} {record}, repeat {repeat}, concurrency {n}"):
                        continue
                    call = engines[name].call
                    if args.seconds:
                        run = call(
                            drive_seconds,
                            chosen,
                            args.seconds,
                            n,
                            args.max_tokens,
                            name,
                            record,
                            place,
                        )
                    else:
                        call(drive, chosen[-n:], WARM_UP_TOKENS, n, name, sampling, record)
                        run = call(drive, chosen, args.max_tokens, n, name, sampling, record)
                    out["runs"].append({**run, "cycle": cycle, "repeat": repeat})
                    print_run(run)
                    report.write(out, args.out)
            if args.phases:
                change(engines, cycle, repeat, place)
        if args.profile and cycle == args.cycles - 1:  # last: `auto` takes slowed rounds for true
            first = next(iter(prompts.values()))[0]
            for name, engine in engines.items():
                write_profiles(engine, name, first, args)

    def change(engines: dict[str, EngineProcess], cycle: int, repeat: int, place: int) -> None:
        own = {phase.traffic: prompts[phase.traffic][place] for phase in args.phases}
        for name in turns(engines, repeat):
            if time_is_up(f"{name} under changing load, repeat {repeat}"):
                continue
            timeline, counts = engines[name].call(
                drive_phases, own, args.phases, args.max_tokens, place
            )
            add_change(out, name, cycle, repeat, timeline, counts)
            report.write(out, args.out)

    for cycle in range(args.cycles):
        if args.together:
            with ExitStack() as stack:
                engines = {
                    name: stack.enter_context(engine_process(args, name)) for name in args.engines
                }
                start_all(engines, args, out)
                serve(engines, cycle)
        else:
            for name in args.engines:
                if not time_is_up(f"{name}, cycle {cycle}"):
                    with engine_process(args, name) as engine:
                        start(engine, name, out)
                        serve({name: engine}, cycle)
    report.write(out, args.out, plots=True)


def add_change(
    out: dict[str, Any],
    name: str,
    cycle: int,
    repeat: int,
    timeline: Timeline,
    counts: dict[str, int],
) -> None:
    """Add the record of a changing load to `out`."""
    record = {
        "engine": name,
        "cycle": cycle,
        "repeat": repeat,
        "phases": [str(phase) for phase in timeline.phases],
        "by_second": timeline.by_second,
        **counts,
    }
    out.setdefault("changing", []).append(record)
    print({key: record[key] for key in ("engine", "repeat", "by_second")}, flush=True)


def write_profiles(
    engine: EngineProcess, name: str, prompts: list[list[int]], args: argparse.Namespace
) -> None:
    """profile-ENGINE.json: rounds of the engine, timed and kernel by kernel, at each --profile."""
    profiles = engine.call(profiles_of, prompts, args.profile)
    for found in profiles:
        short = {k: v for k, v in found.items() if k not in ("kernels", "gaps")}
        print(name, short, flush=True)
    (args.out / f"profile-{name}.json").write_text(json.dumps(profiles, indent=1))


def profiles_of(llm: LLM, prompts: list[list[int]], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Profiles of so many requests each."""
    from benchmarks.rounds import profile_rounds, time_rounds

    # Decoding alone, as long as the model's length allows; then with prefills in between.
    longest = llm.llm_engine.model_config.max_model_len - max(map(len, prompts)) - 1
    loads = list(itertools.product(counts, (longest, 96)))
    # All before the first profile: from then on every launch takes the host longer.
    timed = [time_rounds(llm, prompts, n, 0.4, max_tokens) for n, max_tokens in loads]
    return [
        {
            "concurrency": n,
            "max_tokens": max_tokens,
            "unprofiled": times,
            **profile_rounds(llm, prompts, n, 0.25, max_tokens),
        }
        for (n, max_tokens), times in zip(loads, timed, strict=True)
    ]


def load_server(args: argparse.Namespace, out: dict[str, Any]) -> None:
    """Measures running servers into `out`. They take turns, another one first in each repeat."""
    from benchmarks import server

    prompts = all_prompts(args)
    model = args.model or args.target
    servers = list(zip(args.server, args.label, strict=True))
    for repeat in range(args.repeats):
        first = repeat % len(servers)
        turns = servers[first:] + servers[:first]
        for (record, sampling, n, traffic), (url, label) in itertools.product(
            loads_of(args), turns
        ):
            chosen = prompts[traffic][repeat][: num_requests(n, args)]
            if args.seconds:
                phases = [Phase(SETTLE, n, traffic), Phase(args.seconds, n, traffic)]
                timeline, counts = server.drive_phases(
                    url, model, {traffic: chosen}, phases, args.max_tokens, repeat
                )
                tokens, seconds = timeline.by_phase[1], timeline.seconds
                run = report.timed_record(label, record, n, args.seconds, tokens, seconds, **counts)
            else:
                own = sampling or {}
                server.drive_server(url, model, chosen[-n:], WARM_UP_TOKENS, n, label, own, record)
                run = server.drive_server(
                    url, model, chosen, args.max_tokens, n, label, own, record
                )
            out["runs"].append({**run, "cycle": 0, "repeat": repeat})
            print_run(run)
            report.write(out, args.out)
        for url, label in turns if args.phases else []:
            own = {phase.traffic: prompts[phase.traffic][repeat] for phase in args.phases}
            timeline, counts = server.drive_phases(
                url, model, own, args.phases, args.max_tokens, repeat
            )
            add_change(out, label, 0, repeat, timeline, counts)
            report.write(out, args.out)
    report.write(out, args.out, plots=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("target", nargs="?")
    add("drafter", nargs="?", default="")
    add("--engines", nargs="+", default=["plain", "chain-7", "chain-15", "tree-31"])
    add("--specs", type=json.loads, default={}, help="JSON: engine name -> speculative_config")
    add("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    add("--repeats", type=int, default=3)
    add("--cycles", type=int, default=1, help="times the whole list of engines runs")
    add("--together", action="store_true", help="all engines live side by side and take turns")
    add("--max-tokens", type=int, default=192)
    add("--prompt-tokens", type=int, default=128)
    add("--prompts", type=Path, help='JSON Lines of {"prompt": ...} instead of Python files')
    add("--dataset", type=json.loads, help="JSON of `vllm bench`'s options, dataset-name first")
    add("--sampling", type=json.loads, help="JSON: every run again with these SamplingParams")
    add("--sampling-concurrency", type=int, nargs="+", help="of these runs; default: --concurrency")
    add("--traffic", nargs="+", choices=TRAFFIC, default=[], help="instead of Python files")
    add("--seconds", type=float, help="a run lasts so long, instead of so many requests")
    add("--phases", nargs="+", type=parse_phase, default=[], help="a load that changes, at the end")
    add("--at-once", action="store_true", help="with --together: all engines start at once")
    add("--min-requests", type=int, default=8, help="fewest requests of a run")
    add("--waves", type=int, default=2, help="requests of a run = waves x concurrency")
    add("--seed", type=int, default=0)
    add("--dtype", default="bfloat16")
    add("--max-num-seqs", type=int, help="default: the largest concurrency")
    add("--gpu-memory-utilization", type=float, default=0.8)
    add("--capture-requests", type=int, nargs="+", help="CUDA graphs for so many requests each")
    add("--llm", type=json.loads, default={}, help="JSON of more LLM() arguments")
    add("--engine-llm", type=json.loads, default={}, help="JSON: engine name -> more of them")
    add("--profile", type=int, nargs="+", default=[], help="profile rounds of so many requests")
    add("--in-process", action="store_true", help="engine core in this process")
    add("--time-limit", type=float, help="start no run after so many seconds")
    add("--server", nargs="+", help="URLs of running servers, instead of engines")
    add("--model", help="the server's name for the target")
    add("--label", nargs="+", default=["server"], help="each server's name in the table")
    add("--merge", type=Path, nargs="+", help="load.json files to make one report of")
    add("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if not args.merge and not args.target:
        parser.error("TARGET is missing")
    if not (args.merge or args.server):
        for name in args.engines:
            try:
                spec, _ = speculation(name, args.drafter, args.specs)
            except ValueError as error:
                parser.error(str(error))
            if spec and not spec["model"]:
                parser.error(f"engine {name} needs DRAFTER")
    unknown = {phase.traffic for phase in args.phases} - {"", *TRAFFIC}
    if unknown:
        parser.error(f"--phases: no traffic is called {', '.join(sorted(unknown))}")
    if args.seconds and args.sampling:
        parser.error("--sampling does not go with --seconds: name a traffic, e.g. sampled")
    if args.profile and max(args.profile) > num_requests(max(args.concurrency), args):
        parser.error("--profile needs as many prompts as a run of the largest --concurrency has")
    if args.server and len(args.server) != len(args.label):
        parser.error(f"{len(args.server)} servers need as many names, got {args.label}")
    if args.server and (args.cycles != 1 or args.together):
        parser.error("--cycles and --together are for engines")
    return args


def main() -> None:
    args = parse()
    if args.merge:
        report.write(report.merge(args.merge), args.out, plots=True)
    else:
        if args.in_process:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if args.profile:
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function goes to the worker
        arguments = {key: str(value) for key, value in vars(args).items()}
        out = {"info": {**machine(), "arguments": arguments}, "engines": {}, "runs": []}
        (load_server if args.server else load_engines)(args, out)
    print((args.out / "load.md").read_text())


if __name__ == "__main__":
    main()
