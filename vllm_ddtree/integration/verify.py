# SPDX-License-Identifier: Apache-2.0
"""Whether this vLLM is one that the plugin knows: its version, and every seam in its sources."""

import ast
import functools
import itertools
from pathlib import Path

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


def _members(source: Path) -> set[str]:
    """Names bound at the top of a module (imported ones too), "Class.member" of its classes, and
    "function.attribute" of what its functions give their first parameter."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                names.add(prefix + node.name)
                if not prefix:
                    visit(node.body, node.name + ".")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(prefix + node.name)
                owner = prefix or node.name + "."
                names.update(owner + name for name in _given_first(node))
            elif isinstance(node, ast.Assign):
                names.update(prefix + t.id for t in node.targets if isinstance(t, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(prefix + node.target.id)
            elif isinstance(node, ast.ImportFrom):
                names.update(prefix + (alias.asname or alias.name) for alias in node.names)
            elif isinstance(node, ast.If):
                visit(node.body, prefix)
                visit(node.orelse, prefix)

    visit(ast.parse(source.read_text()).body, "")
    return names


def _source_of(package: Path, module: str) -> Path | None:
    """The file of a module of vLLM, whose package is that folder; nothing is imported."""
    base = package.joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _names(entry: str) -> list[str]:
    """An entry of `SEAMS` as `_members` has it: "name" or "owner.member"."""
    owner, _, members = entry.partition(": ")
    return [f"{owner}.{member}" for member in members.split()] or [owner]


def missing(package: Path, version: Version) -> list[str]:
    """Seams that a vLLM lacks: modules, and names as "module.name".

    Args:
        package: the folder of its package.
        version: its version.

    """
    later = [more for since, more in seams.SEAMS_SINCE.items() if version.release >= since]
    lacks = []
    for module, entries in itertools.chain(*(part.items() for part in (seams.SEAMS, *later))):
        source = _source_of(package, module)
        if source is None:
            lacks.append(module)
            continue
        try:
            present = _members(source)
        except (OSError, SyntaxError):
            present = set()
        names = itertools.chain(*map(_names, entries))
        lacks += [f"{module}.{name}" for name in names if name not in present]
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
