# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ddtree bench`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_ddtree.cli.errors import CommandError, WrongUsage
from vllm_ddtree.cli.pair_arguments import Drafter, Target, split_pair

if TYPE_CHECKING:
    from vllm_ddtree.cli.bench.client import Server
    from vllm_ddtree.cli.bench.record import Results


def bench(
    context: typer.Context,
    target: Target = None,
    drafter: Drafter = None,
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="A running server (repeat for several)."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(help="Servers to start: plain, chain-K, chain-K-adaptive, tree-B, tree-auto."),
    ] = "",
    serve: Annotated[
        str, typer.Option(help="Options of `vllm serve` for these, as one string.")
    ] = "",
    load: Annotated[str, typer.Option(help="Requests in flight, separated by commas.")] = "1,8,32",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Your prompts: a text file, one a line, or .jsonl of data set custom."),
    ] = None,
    waves: Annotated[int, typer.Option(help="Requests of a run, over those in flight.", min=1)] = 4,
    least: Annotated[int, typer.Option(help="Requests of a run at least.", min=1)] = 16,
    repeats: Annotated[int, typer.Option(help="Runs of each; medians are shown.", min=1)] = 1,
    wait: Annotated[int, typer.Option(help="Seconds that a server may take to start.")] = 1800,
    out: Annotated[Path, typer.Option(help="A folder for results, logs and the plot.")] = Path(
        "ddtree-bench"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare plain decoding, chains and trees under load, and say what to use.

    Give TARGET and DRAFTER, and servers are started one after the other; or --url for servers that
    run. What to ask is --prompts or the options that `vllm bench serve` has for data sets; all its
    options may follow.
    """
    loads = read_loads(load)
    target, drafter, options = split_pair(context, target, drafter)
    dataset = any(option.partition("=")[0] == "--dataset-name" for option in options)
    if dataset == (prompts is not None):
        raise WrongUsage(
            "bench: give either --prompts FILE or --dataset-name NAME (drafts depend on the text)"
        )
    if url and methods:
        raise WrongUsage("bench: give either --url or --methods")
    if not url and (target is None or drafter is None):
        raise WrongUsage("bench: give TARGET and DRAFTER first, or --url NAME=URL")
    named = read_urls(url or [])

    from rich.console import Console

    from vllm_ddtree.cli.bench import show
    from vllm_ddtree.cli.bench.client import find_server, run_load
    from vllm_ddtree.cli.bench.recommend import recommend
    from vllm_ddtree.cli.bench.record import Results
    from vllm_ddtree.testing import testbed

    if bed := testbed():
        bed.set_environment()  # before vLLM is imported
    out.mkdir(parents=True, exist_ok=True)
    options += prompt_options(prompts, out) if prompts is not None else []
    say, results = Console(stderr=True), Results([], {})

    def drive(server: Server, repeat: int, requests: int) -> None:
        say.print(f"{server.name}: {requests} in flight ...", highlight=False)
        total = max(least, waves * requests)
        results.runs.append(run_load(server, requests, repeat, total, options, out))

    if named:
        servers = [find_server(name, where) for name, where in named.items()]
        for repeat in range(repeats):
            for requests in loads:
                for server in servers:
                    drive(server, repeat, requests)
    elif target is not None and drafter is not None:
        start_all(
            target, drafter, methods, shlex.split(serve), out, wait, results, drive, loads, repeats
        )
    if not results.runs:
        raise CommandError("; ".join(results.failures.values()))
    advice = recommend(results, drafter, chain_method(drafter))
    about = {"target": target, "drafter": drafter, "options": options, "loads": loads}
    written = show.as_json(results, advice, about)
    (out / "bench.json").write_text(written + "\n")
    if as_json:
        print(written)
    else:
        show.show(results, advice, Console())
    drawn = show.plot(results, out / "bench.png")
    say.print(f"Written: {out}/bench.json{f', {out}/bench.png' if drawn else ''}", highlight=False)
    if not drawn:
        say.print("For a plot: pip install matplotlib")


def read_loads(given: str) -> list[int]:
    """The numbers of --load, ascending."""
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise WrongUsage(f"--load {given}: give whole numbers of at least 1, such as 1,8,32")
    return sorted({int(part) for part in parts})


def read_urls(given: Sequence[str]) -> dict[str, str]:
    """The servers of --url by name."""
    named: dict[str, str] = {}
    for entry in given:
        name, equals, url = entry.partition("=")
        if not equals or not name or not url.startswith(("http://", "https://")):
            raise WrongUsage(f"--url {entry}: give NAME=http://HOST:PORT")
        if name in named or "/" in name:
            raise WrongUsage(f"--url {entry}: give each server a name of its own, without /")
        named[name] = url
    return named


def prompt_options(prompts: Path, folder: Path) -> list[str]:
    """Options of `vllm bench serve` for the user's prompts."""
    import json

    from vllm_ddtree.cli.tune.prompts import read_prompts

    texts = read_prompts(prompts)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return ["--dataset-name", "custom", "--dataset-path", str(path), "--skip-chat-template"]


def chain_method(drafter: str | None) -> str:
    """vLLM's own method for a drafter; dflash where nothing else is known."""
    from vllm_ddtree.config.family import family_of

    try:
        return "dflash" if drafter is None else family_of(drafter, None).method
    except (ValueError, OSError):
        return "dflash"


def start_all(
    target: str,
    drafter: str,
    methods: str,
    options: Sequence[str],
    out: Path,
    wait: float,
    results: Results,
    drive: Callable[[Server, int, int], None],
    loads: Sequence[int],
    repeats: int,
) -> None:
    """Start a server a method, one after the other, and drive each through all loads.

    A method that does not run is noted, and the others go on.
    """
    from vllm_ddtree.cli.bench.methods import speculation, usual
    from vllm_ddtree.cli.bench.servers import serving
    from vllm_ddtree.integration import vllm_version

    names = [name.strip() for name in methods.split(",") if name.strip()]
    names = names or usual(vllm_version().release)
    chain = chain_method(drafter)
    specs: dict[str, dict[str, Any] | None] = {
        name: speculation(name, drafter, chain) for name in names
    }
    for name, spec in specs.items():
        try:
            with serving(name, target, spec, options, out / f"{name}.log", wait) as server:
                for repeat in range(repeats):
                    for requests in loads:
                        drive(server, repeat, requests)
        except CommandError as error:
            results.failures[name] = str(error)
