# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists: tests, files behind links, config keys, metrics, code.

Sources are read, not imported.
"""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import draw_tree

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm_ddtree"
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(ROOT.glob("*/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "benchmarks" / "results" / "README.md",
]
NAMING_CODE = ("architecture.md", "glossary.md")


def _text(name: str) -> str:
    return (ROOT / name).read_text()


def _in_backticks(text: str) -> list[str]:
    """What a document has in single backticks; blocks of code are left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def _paths(source: Path) -> list[str]:
    """What one may call a module: its path, and that without folders at its beginning."""
    parts = source.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return [".".join(parts[start:]) for start in range(len(parts))]


def _members(tree: ast.Module) -> set[str]:
    """Names of a module: "name", "Class", "Class.member", for classes in functions, too."""
    names: set[str] = set()

    def assigned(target: ast.expr, owner: str) -> Iterator[str]:
        match target:
            case ast.Name(name):
                yield owner + name
            case ast.Tuple(elements):
                for element in elements:
                    yield from assigned(element, owner)

    def visit(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
                visit(node.body, node.name + ".")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(owner + node.name)
                inside = [n for n in ast.walk(node) if isinstance(n, ast.ClassDef)]
                visit(list(inside), "")
                if owner:
                    names.update(
                        owner + n.attr
                        for n in ast.walk(node)
                        if isinstance(n, ast.Attribute)
                        and isinstance(n.ctx, ast.Store)
                        and isinstance(n.value, ast.Name)
                        and n.value.id == "self"
                    )
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    names.update(assigned(target, owner))
            elif isinstance(node, ast.AnnAssign):
                names.update(assigned(node.target, owner))
            elif isinstance(node, ast.If):
                visit(node.body, owner)
                visit(node.orelse, owner)

    visit(tree.body, "")
    return names


@functools.cache
def _literal(name: str) -> tuple[str, ...]:
    """A tuple of strings that a module of `config/` binds."""
    for source in sorted((PACKAGE / "config").glob("*.py")):
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == name for target in node.targets
            ):
                return tuple(ast.literal_eval(node.value))
    raise LookupError(name)


@functools.cache
def _our_names() -> frozenset[str]:
    """Every module, and every name in one: alone, and behind what one may call the module."""
    found: set[str] = set()
    for source in PACKAGE.rglob("*.py"):
        members = _members(ast.parse(source.read_text()))
        for path in _paths(source.relative_to(ROOT)):
            found |= {path} | {f"{path}.{member}" for member in members}
        found |= members
    return frozenset(found)


@functools.cache
def _vllm_names() -> frozenset[str]:
    """Names in the modules of vLLM that the plugin knows."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    seams = ast.parse((PACKAGE / "integration" / "seams.py").read_text())
    modules = {
        node.value
        for node in ast.walk(seams)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"vllm(\.\w+)+", node.value)
    }
    assert len(modules) > 20
    found: set[str] = set()
    for module in modules:
        base = package.joinpath(*module.split(".")[1:])
        for source in (base.with_suffix(".py"), base / "__init__.py"):
            if source.is_file():
                found |= _members(ast.parse(source.read_text()))
    # Fields of vLLM's configuration and batch, without their class.
    return frozenset(found | {name.rpartition(".")[2] for name in found})


def _exists(name: str) -> bool:
    """Whether a file or folder, a key, or something in our code or vLLM's has this name."""
    if "/" in name or name.endswith((".py", ".md")):
        return any((folder / name).exists() for folder in (ROOT, PACKAGE))
    keys = (*_literal("OWN_KEYS"), *_literal("DFLASH_KEYS"))
    return name in keys or name in _our_names() or name in _vllm_names()


def _is_code(name: str) -> bool:
    """Whether a name in backticks is code's or a file's, and no option, variable or value."""
    if name.startswith(("-", "VLLM_")):
        return False
    return "/" in name or re.fullmatch(r"[A-Za-z_][\w.]*", name) is not None


@pytest.mark.parametrize("document", NAMING_CODE)
def test_named_code_exists(document: str) -> None:
    names = {name for name in _in_backticks(_text(f"docs/{document}")) if _is_code(name)}
    assert len(names) > 20
    assert not sorted(name for name in names if not _exists(name))


def test_what_does_not_exist_is_found() -> None:
    assert _exists("prepare_rows") and _exists("round.rows.prepare_rows")
    assert _exists("Step.slot_mappings") and _exists("Scheduler.schedule")
    assert not any(map(_exists, ("prepare_row", "rows.schedule", "round/row.py", "Step.slots")))


def test_every_room_is_named() -> None:
    """The architecture lists each folder and module at the top of the package, once."""
    text = _text("docs/architecture.md")
    table = text[text.index("| room |") :].split("\n\n")[0]
    rooms = [
        path.name + "/" * path.is_dir()
        for path in PACKAGE.iterdir()
        if not path.name.startswith("__") and (path.is_dir() or path.suffix == ".py")
    ]
    assert sorted(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == sorted(rooms)


def test_each_word_is_explained_once() -> None:
    words = re.findall(r"^\| ([a-z -]+) \|", _text("docs/glossary.md"), re.MULTILINE)
    words = [word for word in words if word != "word"]
    assert len(words) > 30 and len(set(words)) == len(words)


def test_named_tests_exist() -> None:
    text = _text("docs/coverage.md")
    missing, count, file = [], 0, ""
    for name in re.findall(r"`([^`\s]*(?:\.py|::)[^`\s]*)`", text):
        path, _, test = name.partition("::")
        file = path or file
        source = ROOT / "tests" / file
        count += 1
        function = test.partition("[")[0]
        if not source.is_file() or (function and f"def {function}(" not in source.read_text()):
            missing.append(f"{file}::{test}")
    assert count > 50 and not missing


def test_named_files_exist() -> None:
    """Files of this repository that any document names in backticks."""
    missing = []
    for document in DOCUMENTS:
        if document.name == "coverage.md":  # its paths are below tests/
            continue
        for name in re.findall(
            r"`((?:tests|benchmarks|scripts|docs|cpu)/[\w./-]+)`", document.read_text()
        ):
            if not (ROOT / name).exists():
                missing.append(f"{document.name}: {name}")
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = document.parent / path if path else document
        if not target.exists() or (heading and heading not in _headings(target)):
            missing.append(link)
    assert not missing


def _headings(document: Path) -> set[str]:
    """Headings as GitHub makes anchors of them."""
    found = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in found}


def test_every_document_is_linked_from_the_readme() -> None:
    links = re.findall(r"\]\(([^)#]+)", _text("README.md"))
    assert not {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - set(links)


def test_every_key_is_explained() -> None:
    own, all_keys = _literal("OWN_KEYS"), (*_literal("OWN_KEYS"), *_literal("DFLASH_KEYS"))
    assert not [key for key in own if f"`{key}`" not in _text("README.md")]
    assert not [key for key in all_keys if f"`{key}`" not in _text("docs/configuration.md")]


def test_metrics_are_the_codes() -> None:
    code = "".join(path.read_text() for path in (PACKAGE / "metrics").glob("*.py"))
    names = re.findall(r"`vllm:ddtree_(\w+?)(?:_total)?`", _text("docs/metrics.md"))
    assert len(names) == 6
    assert not [name for name in names if f'"{name}"' not in code]


def test_the_picture_is_what_is_drawn() -> None:
    """But for probabilities, whose last digit is the machine's."""
    drawn = draw_tree.draw(
        draw_tree.make_round(draw_tree.PROMPT, draw_tree.TEXT_LENGTH, draw_tree.NODES)
    )
    number = r">0\.\d\d<"
    assert len(re.findall(number, drawn)) == draw_tree.NODES
    assert re.sub(number, "", drawn) == re.sub(number, "", draw_tree.PICTURE.read_text())
