# SPDX-License-Identifier: Apache-2.0
"""One load on one server, by `vllm bench serve` of the installed vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ddtree.cli.bench.record import Run
from vllm_ddtree.cli.errors import CommandError

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
"""The `vllm` command of this environment."""


@dataclass(frozen=True)
class Server:
    """Where requests go."""

    name: str
    url: str
    """Without a path."""
    model: str
    """As the server names it."""
    tokenizer: str
    """The target's folder or hub name."""


def find_server(name: str, url: str) -> Server:
    """Ask a server what it serves.

    Raises:
        CommandError: it does not answer as a vLLM server does.

    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
            model = json.load(reply)["data"][0]
        return Server(name, url, model["id"], model.get("root") or model["id"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CommandError(f"--url {name}={url}: no vLLM server answers there ({error})") from error


def arguments(
    server: Server, load: int, prompts: int, options: Sequence[str], result: Path
) -> list[str]:
    """Of `vllm bench serve`; an option of the user's goes before ours."""
    own = {
        "--base-url": server.url,
        "--model": server.tokenizer,
        "--served-model-name": server.model,
        "--max-concurrency": str(load),
        "--num-prompts": str(prompts),
        "--num-warmups": str(min(load, 8)),
        "--temperature": "0",
        "--result-dir": str(result.parent),
        "--result-filename": result.name,
    }
    given = {option.partition("=")[0] for option in options}
    ours = [part for name, value in own.items() if name not in given for part in (name, value)]
    return ["bench", "serve", "--save-result", "--disable-tqdm", *ours, *options]


def run_load(
    server: Server, load: int, repeat: int, prompts: int, options: Sequence[str], folder: Path
) -> Run:
    """Serve a load.

    Args:
        server: a running one.
        load: requests in flight.
        repeat: number of this run.
        prompts: requests in all.
        options: of `vllm bench serve`.
        folder: for its result and its log.

    Raises:
        CommandError: it fails; the message has its last words.

    """
    result = folder / f"{server.name}-{load}-{repeat}.json"
    log = result.with_suffix(".log")
    command = [*VLLM, *arguments(server, load, prompts, options, result)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"}
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    if done.returncode or not result.exists():
        raise CommandError(f"vllm bench serve: {last_words(log)} (log: {log})")
    return Run.of(server.name, load, repeat, json.loads(result.read_text()))


def last_words(log: Path) -> str:
    """The last line of a log that names an error, else the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or "error: " in line]
    # The first error causes the others; a traceback ends with it.
    own = [line for line in errors if "ddtree" in line]
    return (own or errors or lines or ["it said nothing"])[-1]
