# SPDX-License-Identifier: Apache-2.0
"""Whether this vLLM is one that the plugin knows: its version, and every seam in its sources."""

import ast
import functools
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_ddtree.compat import seams


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


def _members(source: Path) -> set[str]:
    """Names bound at the top of a module (imported ones too), and "Class.member" of its classes."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef) and not prefix:
                    visit(node.body, node.name + ".")
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


def _source_of(module: str) -> Path | None:
    """The file of a vLLM module, found beside vLLM's own package without importing it."""
    import vllm

    base = Path(vllm.__path__[0]).joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@functools.cache
def check() -> None:
    """Raise `SeamError` unless this vLLM's version is supported and has every seam."""
    version = vllm_version()
    if version not in seams.SUPPORTED_VLLM:
        raise SeamError(
            f"vllm-ddtree supports vllm {seams.SUPPORTED_VLLM}, but vllm {version} is installed: "
            "install a vllm of that range or a newer vllm-ddtree"
        )
    missing = []
    for module, names in seams.SEAMS.items():
        source = _source_of(module)
        if source is None:
            missing.append(module)
            continue
        try:
            present = _members(source)
        except (OSError, SyntaxError):
            present = set()
        missing += [f"{module}.{name}" for name in names if name not in present]
    if missing:
        raise SeamError(
            f"vllm {version} lacks {', '.join(missing)}, which vllm-ddtree builds on: "
            f"install an unmodified vllm {seams.SUPPORTED_VLLM}"
        )
