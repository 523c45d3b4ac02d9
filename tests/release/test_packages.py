# SPDX-License-Identifier: Apache-2.0
"""The wheel and the source distribution: what is in them, and that the wheel works alone."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MADE = shutil.ignore_patterns(
    *(".git", ".venv*", ".wt", ".gpu", "__pycache__", "*.egg-info", "build", "dist", "site"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache"),
)
"""What lies in a checkout and does not belong to it."""
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since setuptools builds inside it."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("checkout") / "c", ignore=MADE)


@pytest.fixture(scope="module")
def build(checkout: Path) -> Callable[[str], Path]:
    def make(what: str) -> Path:
        out = checkout.parent / what
        done = subprocess.run(
            [sys.executable, "-c", BUILD, f"build_{what}", str(out)],
            cwd=checkout,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return out / done.stdout.splitlines()[-1]

    return make


@pytest.fixture(scope="module")
def wheel(build: Callable[[str], Path]) -> Path:
    return build("wheel")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_is_the_package(wheel: Path, checkout: Path) -> None:
    """Every file of the package, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {name for name in files(checkout) if name.startswith("vllm_ddtree/")}
    assert inside == package
    assert "vllm_ddtree/py.typed" in inside


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_string(archive.read(name).decode())
        entries = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Keywords"] and metadata["Author"]
    # An index page has no files beside it.
    text = str(metadata.get_payload())
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", text)
    assert "vllm-ddtree = vllm_ddtree.cli.app:app" in entries
    assert "ddtree = vllm_ddtree.plugin:register" in entries


def test_python_is_the_readmes() -> None:
    ((first, last),) = re.findall(r"Python (3\.\d+) to 3\.(\d+)", (ROOT / "README.md").read_text())
    assert PROJECT["requires-python"] == f">={first},<3.{int(last) + 1}"


def test_the_source_distribution_is_the_checkout(
    build: Callable[[str], Path], checkout: Path
) -> None:
    with tarfile.open(build("sdist")) as archive:
        top, *_ = archive.getnames()
        inside = {
            member.name.removeprefix(f"{top.split('/')[0]}/")
            for member in archive.getmembers()
            if member.isfile()
        }
    own = {n for n in files(checkout) if not n.startswith("build/") and ".egg-info/" not in n}
    assert own <= inside, own - inside
    made = {"PKG-INFO", "setup.cfg"}
    assert not {n for n in inside - own - made if ".egg-info/" not in n}


GENERATE = """
import json, sys
import ddtree_testbed
ddtree_testbed.prepare()
import vllm_ddtree
from vllm import LLM, SamplingParams
target, drafter = sys.argv[1:]
llm = LLM(
    target, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=2,
    kv_cache_memory_bytes=16 << 20,
    speculative_config={"method": "ddtree", "model": drafter, "budget": 7},
)
out = llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
print(json.dumps([vllm_ddtree.__file__, len(out[0].outputs[0].token_ids)]))
llm.llm_engine.engine_core.shutdown()
"""


def test_the_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has vLLM, and nothing of the checkout but the CPU test bed."""
    pair = [str(ROOT / "models" / name) for name in ("nano", "nano-dflash")]
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True)
    python = fresh / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", str(wheel))
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([str(python), "-c", query], capture_output=True, text=True, check=True)
    (fresh / "testbed").symlink_to(Path(sys.prefix) / "testbed")
    # As plain paths: editable installations of that environment do not count.
    there = [sysconfig.get_path("purelib"), str(ROOT / "cpu" / "testbed-plugin")]
    Path(site.stdout.strip(), "vllm-of-the-tests.pth").write_text("\n".join(there))
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != str(ROOT)
    )

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        return done.stdout

    command = str(fresh / "bin" / "vllm-ddtree")
    assert run(command, "--version").strip() == PROJECT["version"]
    checked = json.loads(run(command, "check", *pair, "--max-model-len", "128", "--json"))
    assert checked["fits"]
    file, count = json.loads(run(str(python), "-c", GENERATE, *pair).splitlines()[-1])
    assert Path(file).is_relative_to(fresh)
    assert count == 8
