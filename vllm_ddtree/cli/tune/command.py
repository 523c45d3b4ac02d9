# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ddtree tune`."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_ddtree.cli.errors import CommandError, WrongUsage
from vllm_ddtree.cli.pair_arguments import Drafter, Target, split_pair


def tune(
    context: typer.Context,
    target: Target = None,
    drafter: Drafter = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Your prompts: a text file, one a line, or .jsonl with prompt/messages."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--from", help="Rounds that an engine wrote with VLLM_DDTREE_ROUNDS."),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="What rounds take: JSON, or a log of a server with budget auto."),
    ] = None,
    budget: Annotated[int, typer.Option(help="Nodes of the trees to run.", min=2, max=255)] = 63,
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.", min=2)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    keep: Annotated[
        Path | None, typer.Option(help="A new file for the engine's rounds, for --from.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers, machine-readable.")] = False,
) -> None:
    """What a drafter's trees accept of your texts, and the budgets that follow.

    Runs an engine here (options of `vllm serve`, and those of `vllm bench serve` for data sets, may
    follow TARGET and DRAFTER), or reads the rounds of one.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    from vllm_ddtree.cli.tune import advise, show
    from vllm_ddtree.cli.tune.costs import read_costs
    from vllm_ddtree.cli.tune.seen import count
    from vllm_ddtree.trace.read import Trace, read_trace

    target, drafter, options = split_pair(context, target, drafter)

    def read(path: Path) -> Trace:
        try:
            return read_trace(path)
        except (ValueError, OSError) as error:
            raise WrongUsage(f"--from {path}: {error}") from error

    try:
        known = read_costs(costs) if costs is not None else {}
    except ValueError as error:
        raise WrongUsage(str(error)) from error
    if trace is not None:
        if target is not None or prompts is not None or options:
            raise WrongUsage("tune: give a pair and prompts, or --from alone")
        if not trace.is_file():
            raise WrongUsage(f"--from {trace}: no such file")
        found = read(trace)
    else:
        dataset = any(option.partition("=")[0] == "--dataset-name" for option in options)
        if target is None or drafter is None:
            raise WrongUsage("tune: give TARGET and DRAFTER first, or --from TRACE")
        if dataset == (prompts is not None):
            raise WrongUsage("tune: give either --prompts FILE or --dataset-name NAME")
        with tempfile.TemporaryDirectory() as folder:
            path = keep or Path(folder) / "rounds.jsonl"
            if path.exists():
                raise WrongUsage(f"--keep {path}: it exists; name a new file")
            sampling = {"temperature": temperature, "max_tokens": max_tokens}
            run(target, drafter, prompts, options, budget, sampling, path)
            found = read(path)
    try:
        seen = count(found.requests)
    except ValueError as error:
        raise CommandError(str(error)) from error
    spec = advise.settings(seen, known, found.engine["drafter"], top_k_of(found.engine))
    if as_json:
        print(show.as_json(seen, known, spec))
    else:
        from rich.console import Console

        show.show(seen, known, spec, Console())


def top_k_of(engine: dict[str, Any]) -> int | None:
    """Candidates of a trace's engine; None where the drafter fixes them, or that is not known."""
    from vllm_ddtree.config.family import family_of
    from vllm_ddtree.integration import Family

    try:
        family = family_of(engine["drafter"], None)
    except (ValueError, OSError):
        return None
    return engine.get("top_k") if family in (Family.DFLASH, Family.DSPARK) else None


def run(
    target: str,
    drafter: str,
    prompts: Path | None,
    options: list[str],
    budget: int,
    sampling: dict[str, Any],
    path: Path,
) -> None:
    """Complete the prompts with an engine here, which writes its rounds to `path`."""
    from rich.console import Console
    from rich.progress import Progress

    from vllm_ddtree.cli.tune.engine import engine_options, prepare, write_rounds
    from vllm_ddtree.cli.tune.prompts import dataset_prompts, read_prompts

    @functools.cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(target)

    texts = read_prompts(prompts, tokenizer) if prompts is not None else []
    prepare(path)
    if prompts is None:
        texts, options = dataset_prompts(options, tokenizer)
    own = engine_options(options)
    spec = {"method": "ddtree", "model": drafter, "budget": budget}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Loading", total=len(texts) * sampling["max_tokens"])
        write_rounds(
            target,
            spec,
            texts,
            sampling,
            own,
            lambda new: progress.update(task, advance=new, description="Writing"),
        )
