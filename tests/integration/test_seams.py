# SPDX-License-Identifier: Apache-2.0
"""The seams of vLLM, looked for in sources that nobody imports."""

import os
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_ddtree.integration import seams, verify

OTHERS = [Path(path) for path in os.environ.get("VLLM_DDTREE_SOURCES", "").split(":") if path]

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


@pytest.mark.skipif(not OTHERS, reason="VLLM_DDTREE_SOURCES names no package folder of vLLM")
def test_other_versions_have_every_seam() -> None:
    for package in OTHERS:
        version: dict[str, str] = {}
        exec((package / "_version.py").read_text(), version)
        assert not verify.missing(package, Version(version["__version__"])), package
