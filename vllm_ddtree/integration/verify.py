# SPDX-License-Identifier: Apache-2.0
"""Whether this vLLM is one that the plugin knows: its version, and every seam in its sources."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from vllm_ddtree.integration import seams


class SeamError(RuntimeError):
    """vLLM is not one this plugin knows. The message is one line with the fix."""


def vllm_version() -> Version:
    """Version of the vLLM in this process.

    Raises:
        SeamError: it is no version (a source tree that was never built says "dev").

    """
    import vllm

    try:
        return Version(vllm.__version__)
    except InvalidVersion as error:
        raise SeamError(
            f"vllm-ddtree supports vllm {seams.SUPPORTED_VLLM}, but this one calls itself "
            f"{vllm.__version__!r}: install a released vllm of that range"
        ) from error


class Seam(NamedTuple):
    """One name of an entry of `SEAMS`."""

    name: str
    """"name" or "owner.member"."""
    parameters: list[str] | None
    """As listed, `*` and `...` among them; None: no parameters are listed."""


def parse(entry: str) -> list[Seam]:
    """The names of an entry."""
    owner, colon, rest = entry.partition(": ")
    found = re.findall(r"(\w+)(\([^)]*\))?", rest if colon else entry)
    return [
        Seam(
            f"{owner}.{name}" if colon else name,
            re.findall(r"[\w*.]+", parameters) if parameters else None,
        )
        for name, parameters in found
    ]


class Member(NamedTuple):
    """What a module or class binds to a name."""

    arguments: ast.arguments | None = None
    """Of a function."""
    bound: bool = False
    """Whether a call does not pass the first one (self, cls)."""


PLAIN = Member()


def _given_first(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Attributes and buffers that a function gives its first parameter: a method, its object."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    first = parameters[0].arg if parameters else None
    names = set()
    for node in ast.walk(function):
        match node:
            case ast.Attribute(ast.Name(owner), name, ast.Store()) if owner == first:
                names.add(name)
            case ast.Call(
                ast.Attribute(ast.Name(owner), "register_buffer"), [ast.Constant(str(name)), *_]
            ) if owner == first:
                names.add(name)
    return names


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool) -> Member:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    return Member(node.args, in_class and "staticmethod" not in decorators)


def members(package: Path, module: str, owners: Collection[str]) -> dict[str, Member]:
    """Names bound at the top of a module (imported ones too), and "owner.member" of classes and of
    what functions give their first parameter.

    Args:
        package: the folder of vLLM's package.
        module: its name; nothing is imported.
        owners: the classes and functions whose members are wanted.

    """
    source = source_of(package, module)
    names: dict[str, Member] = {}
    if source is None:
        return names

    def add(name: str, member: Member = PLAIN) -> None:
        if member.arguments is not None or name not in names:
            names[name] = member

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                add(prefix + node.name)
                if not prefix and node.name in owners:
                    visit(node.body, node.name + ".")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                add(prefix + node.name, _function(node, bool(prefix)))
                if prefix or node.name in owners:
                    for name in _given_first(node):
                        add((prefix or node.name + ".") + name)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        add(prefix + target.id)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                add(prefix + node.target.id)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*":
                        for name in members(package, _imported(module, source, node), ()):
                            add(name)
                    else:
                        add(prefix + (alias.asname or alias.name))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    add(prefix + (alias.asname or alias.name.partition(".")[0]))
            elif isinstance(node, ast.If):
                visit(node.body, prefix)
                visit(node.orelse, prefix)

    visit(ast.parse(source.read_text()).body, "")
    return names


def _imported(module: str, source: Path, node: ast.ImportFrom) -> str:
    """The module from which a statement of `module` imports."""
    if not node.level:
        return node.module or ""
    above = module.split(".") + [""] * (source.name == "__init__.py")
    return ".".join([*above[: -node.level], *filter(None, [node.module])])


def source_of(package: Path, module: str) -> Path | None:
    """The file of a module of vLLM, whose package is that folder."""
    base = package.joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def misfits(parameters: list[str], member: Member) -> Iterator[str]:
    """How a function's parameters differ from the listed ones, each in words."""
    arguments = member.arguments
    if arguments is None:
        yield "as a function"
        return
    by_position = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = by_position[: len(by_position) - len(arguments.defaults)]
    by_name = [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]
    required += [
        a.arg
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    if member.bound:
        by_position, required = by_position[1:], required[1:]
    listed = [name for name in parameters if name != "..."]
    star = listed.index("*") if "*" in listed else len(listed)
    for place, name in enumerate(listed[:star]):
        if by_position[place : place + 1] != [name] and not (
            arguments.vararg and place >= len(by_position)
        ):
            yield f"parameter {place + 1} {name!r}"
    for name in listed[star + 1 :]:
        if name not in by_name and not arguments.kwarg:
            yield f"parameter {name!r}"
    if "..." not in parameters:
        for name in required:
            if name not in listed:
                yield f"a default of {name!r}"


def missing(package: Path, version: Version) -> list[str]:
    """Seams that a vLLM lacks: modules, names as "module.name", and what of their parameters.

    Args:
        package: the folder of its package.
        version: its version.

    """
    later = [more for since, more in seams.SEAMS_SINCE.items() if version.release >= since]
    there = {m: e for m, e in seams.SEAMS_OF_CUDA.items() if source_of(package, m) is not None}
    wanted: dict[str, list[Seam]] = {}
    for module, entries in itertools.chain(*(d.items() for d in (seams.SEAMS, *later, there))):
        wanted.setdefault(module, []).extend(itertools.chain(*map(parse, entries)))
    lacks = []
    for module, names in wanted.items():
        if source_of(package, module) is None:
            lacks.append(module)
            continue
        try:
            present = members(package, module, {seam.name.partition(".")[0] for seam in names})
        except (OSError, SyntaxError):
            present = {}
        for name, parameters in names:
            if name not in present:
                lacks.append(f"{module}.{name}")
            elif parameters is not None:
                lacks += [
                    f"{what} of {module}.{name}" for what in misfits(parameters, present[name])
                ]
    return lacks


@functools.cache
def check() -> None:
    """Raise `SeamError` unless this vLLM's version is supported and has every seam."""
    import vllm

    version = vllm_version()
    if version not in seams.SUPPORTED_VLLM:
        raise SeamError(
            f"vllm-ddtree supports vllm {seams.SUPPORTED_VLLM}, but vllm {version} is installed: "
            "install a vllm of that range or a newer vllm-ddtree"
        )
    if lacks := missing(Path(vllm.__path__[0]), version):
        raise SeamError(
            f"vllm {version} lacks {', '.join(lacks)}, which vllm-ddtree builds on: "
            f"install an unmodified vllm {seams.SUPPORTED_VLLM}"
        )


def require() -> None:
    """Raise ValueError, which vLLM shows to the user, unless `check()` finds all."""
    try:
        check()
    except SeamError as error:
        raise ValueError(f"method 'ddtree' cannot be used: {error}") from error
