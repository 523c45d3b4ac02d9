# SPDX-License-Identifier: Apache-2.0
"""What the package uses of vLLM is listed in the seams: read from its sources, not imported.

Imports, calls of imported functions, methods of vLLM's that a class overrides, and names with a
leading underscore. Imports for types alone (`if TYPE_CHECKING:`) need not be listed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import vllm_ddtree
from vllm_ddtree.integration import seams, verify
from vllm_ddtree.patches.table import PATCHES

OURS = Path(vllm_ddtree.__file__).parent
FILES = [
    path
    for path in sorted(OURS.rglob("*.py"))
    if path.relative_to(OURS).parts[0] not in ("demo", "testing")
]
# Underscore names that are neither ours nor vLLM's.
FOREIGN = {"_actions": "argparse.ArgumentParser"}


def vllm_folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


VLLM = vllm_folder()


@functools.cache
def listed() -> dict[str, dict[str, list[str] | None]]:
    """Module -> name -> parameters, of all versions."""
    found: dict[str, dict[str, list[str] | None]] = {}
    for part in (seams.SEAMS, seams.SEAMS_OF_CUDA, *seams.SEAMS_SINCE.values()):
        for module, entries in part.items():
            for entry in entries:
                for name, parameters in verify.parse(entry):
                    known = found.setdefault(module, {})
                    known.setdefault(name.partition(".")[0], None)
                    known[name] = parameters or known.get(name) or parameters
    return found


PRIVATE = {
    name.rpartition(".")[2]
    for names in listed().values()
    for name in names
    if name.rpartition(".")[2].startswith("_")
}


class Imported(NamedTuple):
    """`from module import name as alias`; without a name `import module as alias`."""

    module: str
    name: str
    alias: str

    @property
    def as_module(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


class NoTypes(ast.NodeTransformer):
    """Drops what stands under `if TYPE_CHECKING:`."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return node.orelse
        return self.generic_visit(node)


def read(source: str) -> ast.Module:
    return NoTypes().visit(ast.parse(source))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return read(path.read_text())


def imports(tree: ast.AST) -> Iterator[Imported]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield Imported(node.module or "", alias.name, alias.asname or alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    yield Imported(alias.name, "", alias.asname or "vllm")


def unlisted_imports(tree: ast.AST) -> Iterator[str]:
    """Imports, and attributes of imported modules."""
    modules = {}
    for found in imports(tree):
        known = listed().get(found.module, {})
        if found.as_module in listed():
            modules[found.alias] = found.as_module
        elif found.name not in known:
            yield found.as_module
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(alias), name) if alias in modules and name != "__path__":
                if name not in listed()[modules[alias]]:
                    yield f"{modules[alias]}.{name}"


def own_names(tree: ast.AST) -> set[str]:
    """What a file defines itself: functions, variables, fields, and attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                names.add(name)
    return names


def unlisted_private_names(tree: ast.AST) -> Iterator[str]:
    own = own_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                pass
            case ast.Call(
                ast.Name("getattr" | "hasattr" | "setattr"), [_, ast.Constant(str(name)), *_]
            ):
                pass
            case _:
                continue
        private = name.startswith("_") and not name.endswith("__")
        if private and not (name in own or name in PRIVATE or name in FOREIGN):
            yield name


def unfit_calls(tree: ast.AST) -> Iterator[str]:
    """Calls of imported functions with arguments that are not listed."""
    functions = {found.alias: found for found in imports(tree) if found.name}
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name(alias), given, keywords) if alias in functions:
                module, name, _ = functions[alias]
            case _:
                continue
        defined = verify.members(VLLM, module, ()).get(name)
        if defined is None or defined.arguments is None:
            continue  # a class, or imported there
        parameters = listed()[module][name]
        if parameters is None:
            yield f"{module}.{name}: no parameters"
            continue
        by_position = [p for p in parameters if p != "..."]
        if "*" in by_position:
            by_position = by_position[: by_position.index("*")]
        if len(given) > len(by_position):
            yield f"{module}.{name}: {len(given)} arguments"
        for keyword in keywords:
            if keyword.arg is not None and keyword.arg not in parameters:
                yield f"{module}.{name}: {keyword.arg}"


def definitions(module: str, name: str) -> Iterator[tuple[str, str]]:
    """A class of vLLM's and those that it extends: (module, class)."""
    source = verify.source_of(VLLM, module)
    if source is None:
        return
    tree = ast.parse(source.read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield module, name
            for base in node.bases:
                while isinstance(base, ast.Subscript):
                    base = base.value
                if isinstance(base, ast.Name):
                    yield from definitions(module, base.id)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    yield from definitions(node.module or "", alias.name)


def unlisted_overrides(tree: ast.AST) -> Iterator[str]:
    """Methods of vLLM's classes that a class of ours replaces without listed parameters, or with
    other names for them."""
    classes = {found.alias: found for found in imports(tree) if found.name}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        above = [
            each
            for base in node.bases
            if isinstance(base, ast.Name) and base.id in classes
            for each in definitions(*classes[base.id][:2])
        ]
        for method in node.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            defining = [
                (module, owner)
                for module, owner in above
                if (m := verify.members(VLLM, module, (owner,)).get(f"{owner}.{method.name}"))
                and m.arguments is not None
            ]
            known = [
                listed().get(module, {}).get(f"{owner}.{method.name}") for module, owner in defining
            ]
            decorators = {ast.unparse(each) for each in method.decorator_list}
            special = method.name.endswith("__") and method.name not in ("__init__", "__call__")
            if special or "property" in decorators or not defining:
                continue
            parameters = next((each for each in known if each is not None), None)
            if parameters is None:
                yield f"{node.name}.{method.name} of {defining[0]}"
                continue
            ours = [a.arg for a in (*method.args.args, *method.args.kwonlyargs)][1:]
            for place, name in enumerate(parameters):
                if name in ("*", "..."):
                    break
                # A constructor's are named as we like: it is ours that is called.
                if method.name != "__init__" and ours[place : place + 1] != [name]:
                    yield f"{node.name}.{method.name}: {name}"


RULES = {
    "import": unlisted_imports,
    "private": unlisted_private_names,
    "call": unfit_calls,
    "override": unlisted_overrides,
}


@pytest.mark.parametrize("rule", RULES)
def test_all_that_is_used_is_listed(rule: str) -> None:
    assert not {
        str(path.relative_to(OURS)): found
        for path in FILES
        if (found := list(RULES[rule](tree_of(path))))
    }


def test_what_is_replaced_is_listed() -> None:
    for patch in PATCHES:
        module, _, name = patch.target.partition(":")
        assert name in listed()[module], patch.target


HEAD = "from typing import TYPE_CHECKING\nfrom vllm.v1.core.sched.scheduler import Scheduler\n"


@pytest.mark.parametrize(
    ("rule", "source", "found"),
    [
        ("import", "from vllm.v1.core.sched.scheduler import Other", ["Other"]),
        ("import", "def f():\n    from vllm.nowhere import thing", ["vllm.nowhere.thing"]),
        ("import", "import vllm.nowhere", ["vllm.nowhere"]),
        ("import", "from vllm import envs\nenvs.NO_SUCH_VARIABLE", ["NO_SUCH_VARIABLE"]),
        ("import", "if TYPE_CHECKING:\n    from vllm.nowhere import Type", []),
        ("import", "from vllm import envs\nenvs.VLLM_USE_V2_MODEL_RUNNER", []),
        ("private", "scheduler._no_such_name", ["_no_such_name"]),
        ("private", "getattr(scheduler, '_no_such_name', None)", ["_no_such_name"]),
        ("private", "manager._no_such_name = 1", ["_no_such_name"]),
        ("private", "manager._capture_descs", []),
        (
            "private",
            "class Ours:\n    def f(self):\n        self._mine = 1\n        self._mine",
            [],
        ),
        ("call", "from vllm.logger import init_logger\ninit_logger('a', 'b')", ["2 arguments"]),
        ("call", "from vllm.logger import init_logger\ninit_logger(nome='a')", ["nome"]),
        ("call", "from vllm.logger import init_logger\ninit_logger(name='a')", []),
        (
            "override",
            "class Ours(Scheduler):\n    def reset_prefix_cache(self): ...",
            ["Ours.reset_prefix_cache"],
        ),
        (
            "override",
            "class Ours(Scheduler):\n    def finish_requests(self, request_ids, status): ...",
            ["finished_status"],
        ),
        ("override", "class Ours(Scheduler):\n    def own_method(self): ...", []),
    ],
)
def test_the_rules(rule: str, source: str, found: list[str]) -> None:
    got = list(RULES[rule](read(HEAD + source)))
    assert len(got) == len(found)
    assert all(what in one for one, what in zip(got, found, strict=True)), got
