# SPDX-License-Identifier: Apache-2.0
"""vllm_sources.py VERSION FOLDER MODULE...: the sources of modules of a vLLM release.

A wheel of vLLM for CUDA has hundreds of megabytes, its Python sources a few: only they are read
from it, through pip's own index and session. What FOLDER has already is not asked for again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

CHUNK = 1 << 18
"""Bytes asked for at a time: a few modules that lie side by side."""


def wheel_url(version: str) -> str:
    """Where pip would take the wheel from."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    command += ["--no-deps", "--ignore-installed", "--only-binary", ":all:", f"vllm=={version}"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(report)["install"][0]["download_info"]["url"]


def fetch(version: str, folder: Path, modules: list[str]) -> None:
    """Write `FOLDER/vllm/...py` of the modules that the release has, and of its version."""
    from pip._internal.commands import create_command
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP

    wanted = paths(["vllm._version", *modules])
    command = create_command("download")
    options, _ = command.parse_args([f"vllm=={version}"])
    session = command._build_session(options)  # type: ignore[attr-defined]
    with LazyZipOverHTTP(wheel_url(version), session, chunk_size=CHUNK) as lazy:
        wheel = zipfile.ZipFile(lazy)
        for info in sorted(wheel.infolist(), key=lambda info: info.header_offset):
            if info.filename in wanted:
                target = folder / info.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                part = target.with_suffix(".part")
                part.write_bytes(wheel.read(info))
                part.replace(target)


def paths(modules: list[str]) -> set[str]:
    """Where a wheel may have the modules."""
    bases = [module.replace(".", "/") for module in modules]
    return {base + end for base in bases for end in (".py", "/__init__.py")}


def main() -> None:
    version, folder, modules = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    done = folder / "modules.txt"
    key = "\n".join(sorted(modules))
    if not done.exists() or done.read_text() != key:
        fetch(version, folder, modules)
        done.write_text(key)


if __name__ == "__main__":
    main()
