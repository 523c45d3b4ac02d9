# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists: tests in docs/coverage.md, files behind links, config keys."""

import re
from pathlib import Path

import pytest

from vllm_ddtree.config.keys import DFLASH_KEYS, OWN_KEYS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md")), *sorted(ROOT.glob("docs/*.md"))]


def test_named_tests_exist() -> None:
    text = (ROOT / "docs" / "coverage.md").read_text()
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    missing = [
        link for link in links if "://" not in link and not (document.parent / link).exists()
    ]
    assert not missing


def test_the_readme_names_every_key() -> None:
    text = (ROOT / "README.md").read_text()
    assert not [key for key in (*OWN_KEYS, *DFLASH_KEYS) if f"`{key}`" not in text]
