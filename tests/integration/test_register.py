# SPDX-License-Identifier: Apache-2.0
"""An installed plugin that nobody uses costs a vLLM process next to nothing: files that are parsed
and modules that are imported are counted, not seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ddtree.integration import importing

REGISTER = """
import ddtree_testbed
ddtree_testbed.set_environment()
import ast, json, sys
import vllm.config
parsed, parse = [], ast.parse
def counting(*args, **kwargs):
    parsed.append(args[1:])
    return parse(*args, **kwargs)
ast.parse = counting
before = set(sys.modules)
from vllm_ddtree.plugin import register
register()
register()
modules = set(sys.modules) - before
early = "vllm.engine.arg_utils" in sys.modules
from vllm.engine.arg_utils import EngineArgs
mark = "_vllm_ddtree_original"
print()
print(json.dumps({
    "vllm": sorted(name for name in modules if name.partition(".")[0] == "vllm"),
    "ours": sorted(name for name in modules if name.startswith("vllm_ddtree.")),
    "early": early,
    "parsed": len(parsed),
    "hooked": [hasattr(getattr(EngineArgs, name), mark) for name in (
        "create_engine_config", "create_speculative_config", "add_cli_args")],
}))
"""


def test_the_cost_of_an_unused_plugin() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REGISTER], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # An engine core or a worker need not import what makes configurations.
    assert found["vllm"] == [] and not found["early"]
    rooms = {name.split(".")[1] for name in found["ours"]}
    assert rooms == {"integration", "plugin", "presence"}
    # Nor are vLLM's sources read, where configurations are made but none is DDTree's.
    assert found["parsed"] == 0
    assert found["hooked"] == [True] * 3


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "some_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("some_package")]:
        del sys.modules[name]


def test_a_module_is_waited_for(package: Path) -> None:
    (package / "late.py").write_text("value = 1\n")
    calls: list[int] = []

    def callback() -> None:
        calls.append(sys.modules["some_package.late"].value)

    importing.when_imported("some_package.late", callback)
    assert calls == []
    import some_package.late  # type: ignore[import-not-found]

    assert calls == [1]
    importing.when_imported("some_package.late", callback)
    assert calls == [1, 1], "at once"
    assert some_package.late.value == 1
    loader = some_package.late.__loader__
    assert loader is some_package.late.__spec__.loader
    assert type(loader).__name__ == "SourceFileLoader", "as without us"


def test_a_module_that_fails_at_first(package: Path) -> None:
    broken = package / "broken.py"
    broken.write_text("raise RuntimeError('not yet')\n")
    calls: list[str] = []
    importing.when_imported("some_package.broken", lambda: calls.append("called"))
    with pytest.raises(RuntimeError, match="not yet"):
        import some_package.broken  # type: ignore[import-not-found]
    assert calls == []
    broken.write_text("value = 2  # another size, so that no cache is taken\n")
    import some_package.broken

    assert calls == ["called"] and some_package.broken.value == 2


def test_a_module_that_is_not_there(package: Path) -> None:
    importing.when_imported("some_package.none", lambda: None)
    with pytest.raises(ModuleNotFoundError, match=r"some_package\.none"):
        import some_package.none  # type: ignore[import-not-found]  # noqa: F401
