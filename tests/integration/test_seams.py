# SPDX-License-Identifier: Apache-2.0
"""A seam of vLLM that is missing or different is found in sources that nobody imports."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_ddtree.integration import seams, verify

OTHERS = [Path(path) for path in os.environ.get("VLLM_DDTREE_SOURCES", "").split(":") if path]

NEWEST = "0.33.0"
FETCH = Path(__file__).resolve().parents[2] / "scripts" / "vllm_sources.py"

SOURCE = """
from elsewhere import borrowed
CONSTANT = 1
if CONSTANT:
    def conditional(layer, other):
        layer.attribute = other.ignored = 1
        layer.register_buffer("buffer", None)
        layer.register_buffer(CONSTANT, None)
        print(layer.read)

class Class:
    field: int
    other = 2

    def method(self):
        self.given, local = 1, 2
        if local:
            self.annotated: int = 3
        local.ignored = 4
        print(self.read)

    @staticmethod
    def without_parameters():
        pass
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A vLLM of one module."""
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "__init__.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("borrowed", True),
        ("CONSTANT", True),
        ("conditional", True),
        ("conditional.attribute", True),
        ("conditional.buffer", True),
        ("conditional.ignored", False),
        ("conditional.read", False),
        ("Class.field", True),
        ("Class.other", True),
        ("Class.method", True),
        ("Class.given", True),
        ("Class.annotated", True),
        ("Class.ignored", False),
        ("Class.read", False),
        ("Class.without_parameters", True),
        ("method", False),
        ("given", False),
    ],
)
def test_a_name(monkeypatch: pytest.MonkeyPatch, vllm: Path, name: str, there: bool) -> None:
    monkeypatch.setattr(seams, "SEAMS", {"vllm.v1": (name.replace(".", ": "),)})
    monkeypatch.setattr(seams, "SEAMS_SINCE", {})
    assert verify.missing(vllm, Version("1.0")) == ([] if there else [f"vllm.v1.{name}"])


@pytest.mark.parametrize(
    ("version", "wanted"), [("0.32.9", False), ("0.33.0rc1", True), ("0.33", True)]
)
def test_what_only_later_versions_have(
    monkeypatch: pytest.MonkeyPatch, vllm: Path, version: str, wanted: bool
) -> None:
    monkeypatch.setattr(seams, "SEAMS", {"vllm.v1": ("CONSTANT",)})
    newer = {"vllm.v1": ("Class: field newer", "Newer"), "vllm.v2": ("x",)}
    monkeypatch.setattr(seams, "SEAMS_SINCE", {(0, 33): newer})
    lacks = ["vllm.v1.Class.newer", "vllm.v1.Newer", "vllm.v2"] if wanted else []
    assert verify.missing(vllm, Version(version)) == lacks


PARAMETERS = """
def function(a, b, c=1, *, d, e=2): ...
def passes_on(a, *args, **kwargs): ...
class Class:
    def method(self, a, b=1): ...
    @classmethod
    def of_class(cls, a): ...
    @staticmethod
    def static(a): ...
    def kept(self, a): ...
    kept = property(kept)
"""


@pytest.mark.parametrize(
    ("entry", "lacks"),
    [
        ("function(a, b, c, *, d, e)", []),
        ("function(a, b, *, d)", []),
        ("function(a, *, b, d)", []),
        ("function(a, ...)", []),
        ("function(...)", []),
        ("function(*, c, ...)", []),
        ("function(a, *, d)", ["a default of 'b'"]),
        ("function(a, b)", ["a default of 'd'"]),
        ("function()", ["a default of 'a'", "a default of 'b'", "a default of 'd'"]),
        ("function(b, a, *, d)", ["parameter 1 'b'", "parameter 2 'a'"]),
        ("function(a, b, *, d, f)", ["parameter 'f'"]),
        ("function(a, b, c, d)", ["parameter 4 'd'"]),
        ("passes_on(a, b, *, c)", []),
        ("passes_on(b, ...)", ["parameter 1 'b'"]),
        ("Class: method(a) of_class(a) static(a) kept(a)", []),
        ("Class: method(a, b) other", ["other"]),
        ("Class: method()", ["a default of 'a'"]),
        ("Class: static(*, a) method(*, b, a)", []),
        ("Class: of_class(b)", ["parameter 1 'b'", "a default of 'a'"]),
        ("Class()", ["as a function"]),
    ],
)
def test_parameters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: str, lacks: list[str]
) -> None:
    (tmp_path / "v1.py").write_text(PARAMETERS)
    monkeypatch.setattr(seams, "SEAMS", {"vllm.v1": (entry,)})
    monkeypatch.setattr(seams, "SEAMS_SINCE", {})
    found = verify.missing(tmp_path, Version("1.0"))
    for each, what in zip(found, lacks, strict=True):
        assert each.startswith(f"{what} of vllm.v1.") or each.endswith(f".{what}")


def test_all_that_a_module_imports_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`from .other import *`, of a package and of a module, above and below."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "__init__.py").write_text("from .b import *")
    (tmp_path / "a" / "b" / "__init__.py").write_text("from .c import *\nfrom vllm.d import *")
    (tmp_path / "a" / "b" / "c.py").write_text("from ..e import *")
    (tmp_path / "a" / "e.py").write_text("x = 1")
    (tmp_path / "d.py").write_text("y = 1")
    monkeypatch.setattr(seams, "SEAMS", {"vllm.a": ("x", "y", "z")})
    monkeypatch.setattr(seams, "SEAMS_SINCE", {})
    assert verify.missing(tmp_path, Version("1.0")) == ["vllm.a.z"]


def test_what_cuda_alone_has(monkeypatch: pytest.MonkeyPatch, vllm: Path) -> None:
    entries = {"vllm.v1": ("CONSTANT", "absent"), "vllm.not_there": ("anything",)}
    for name in ("SEAMS", "SEAMS_SINCE"):
        monkeypatch.setattr(seams, name, {})
    monkeypatch.setattr(seams, "SEAMS_OF_CUDA", entries)
    assert verify.missing(vllm, Version("1.0")) == ["vllm.v1.absent"]


def version_of(package: Path) -> Version:
    names: dict[str, str] = {}
    exec((package / "_version.py").read_text(), names)
    return Version(names["__version__"])


def test_the_newest_vllm_has_every_seam() -> None:
    """Of its wheel the modules that the seams name, read once and kept in the environment."""
    folder = Path(sys.prefix) / f"vllm-{NEWEST}"
    modules = {*seams.SEAMS, *seams.SEAMS_OF_CUDA}.union(*seams.SEAMS_SINCE.values())
    command = [sys.executable, str(FETCH), NEWEST, str(folder), *sorted(modules)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
    except (subprocess.SubprocessError, OSError) as error:
        said = str(getattr(error, "stderr", "") or "").strip().splitlines()[-1:]
        reason = f"NOT CHECKED: the sources of vLLM {NEWEST} could not be fetched: {error} {said}"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    package = folder / "vllm"
    assert version_of(package) == Version(NEWEST) in seams.SUPPORTED_VLLM
    assert verify.missing(package, Version(NEWEST)) == []
    assert len(list(package.rglob("*.py"))) > 50


@pytest.mark.skipif(not OTHERS, reason="VLLM_DDTREE_SOURCES names no package folder of vLLM")
def test_other_versions_have_every_seam() -> None:
    for package in OTHERS:
        assert not verify.missing(package, version_of(package)), package
