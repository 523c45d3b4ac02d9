# SPDX-License-Identifier: Apache-2.0
"""`./demo` and `./serve` from a fresh clone: arguments are read before anything is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import cpu_env

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = "the environment is made"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone has, with a set-up that says that it was called."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("demo", "serve", "scripts/in-cpu-env"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / "scripts" / "cpu_env.py").write_text(f"import sys; sys.exit({INSTALLED!r})\n")
    (folder / "vllm_ddtree").symlink_to(ROOT / "vllm_ddtree")
    (folder / "models").symlink_to(ROOT / "models")
    return folder


def run(script: Path, *arguments: str, cwd: Path = Path("/")) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(script), *arguments], capture_output=True, text=True, cwd=cwd, env=environment
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("script", ["demo", "serve"])
def test_help_installs_nothing(clone: Path, script: str) -> None:
    status, said = run(clone / script, "--help")
    assert status == 0 and said.startswith(f"usage: {script}") and INSTALLED not in said


def test_through_a_link_from_another_folder(clone: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(clone / "demo")
    status, said = run(link, "--help", cwd=tmp_path)
    assert status == 0 and said.startswith("usage: demo")


DRAFTER, TARGET = (str(ROOT / "models" / name) for name in ("nano-dflash", "nano"))


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("demo", ["--chain", "99"], "--chain 99: give a whole number from 1 to 7"),
        ("demo", ["--budget", "0"], "--budget 0: give a whole number from 1 to 255"),
        ("demo", ["--max-tokens", "0"], "--max-tokens 0"),
        ("demo", ["--prompt", ""], "a prompt is empty"),
        ("demo", ["--target", "nowhere"], "no model in nowhere"),
        ("demo", ["--target", DRAFTER, "--drafter", TARGET], "exchange the two"),
        ("demo", ["--drafter", TARGET], "is no DFlash drafter"),
        ("demo", ["--target", DRAFTER], "is a drafter"),
        ("serve", ["--budget", "tree"], "--budget tree: give a number from 1 to 255"),
        ("demo", ["--serve", "--port", "0"], "--port 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_values_install_nothing(
    clone: Path, script: str, arguments: list[str], words: str
) -> None:
    status, said = run(clone / script, *arguments)
    assert status == 2 and words in said.splitlines()[-1] and INSTALLED not in said


def test_right_ones_do(clone: Path) -> None:
    status, said = run(clone / "demo", "--budget", "7")
    assert status == 1 and said.strip() == INSTALLED


def test_a_failed_download_names_the_network() -> None:
    log = "$ pip install a\nNewConnectionError\n\n$ pip install torch\n"
    assert not cpu_env.no_network(log + "ERROR: no space left on device\n")
    assert cpu_env.no_network(log + "WARNING: Retrying after NewConnectionError(...)\n")


def test_an_interrupted_set_up_says_how_to_go_on(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import scripts.cpu_env as c, runpy\n"
        "def stop(*_, **__): raise KeyboardInterrupt\n"
        "import json; json.dumps = stop\n"
        "runpy.run_path(c.__file__, run_name='__main__')"
    )
    done = subprocess.run(
        [cpu_env.sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True
    )
    assert done.returncode == 130
    assert done.stderr.strip() == "Interrupted. The same command goes on where it stopped."
