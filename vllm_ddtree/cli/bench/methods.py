# SPDX-License-Identifier: Apache-2.0
"""Names of methods: plain, chain-K, chain-K-adaptive, tree-B, tree-auto."""

from __future__ import annotations

import re
from typing import Any

from vllm_ddtree.cli.errors import WrongUsage

NAME = re.compile(
    r"plain|chain-(?P<chain>[1-9]\d*)(?P<adaptive>-adaptive)?|tree-(?P<tree>auto|\d+)"
)
ADAPTIVE_SINCE = (0, 33)
"""The vLLM that verifies prefixes of a chain by load."""


def is_method(name: str) -> bool:
    """Whether a name says how a server decodes."""
    return NAME.fullmatch(name) is not None


def fixed_budget(name: str) -> int | None:
    """Nodes of a method with one budget, 0 of plain decoding; None: another method."""
    found = NAME.fullmatch(name)
    if found is None:
        return None
    if name == "plain":
        return 0
    tree = found["tree"]
    return int(tree) if tree and tree != "auto" else None


def speculation(name: str, drafter: str, chain_method: str) -> dict[str, Any] | None:
    """The speculative_config of a method; None: plain decoding.

    Args:
        name: the method's.
        drafter: a folder or a hub name.
        chain_method: vLLM's own method for it, dflash or dspark.

    Raises:
        WrongUsage: it is no method.

    """
    found = NAME.fullmatch(name)
    if found is None:
        raise WrongUsage(
            f"--methods {name}: give plain, chain-K, chain-K-adaptive, tree-B or tree-auto"
        )
    if name == "plain":
        return None
    if tree := found["tree"]:
        budget = tree if tree == "auto" else int(tree)
        return {"method": "ddtree", "model": drafter, "budget": budget}
    spec: dict[str, Any] = {"method": chain_method, "model": drafter}
    spec["num_speculative_tokens"] = int(found["chain"])
    if found["adaptive"]:
        spec["enable_adaptive_verification"] = True
    return spec


def usual(version: tuple[int, ...]) -> list[str]:
    """Methods to compare where none are named.

    Args:
        version: of vLLM, its first two numbers at least.

    """
    adaptive = ["chain-7-adaptive"] if version[:2] >= ADAPTIVE_SINCE else []
    return ["plain", "chain-7", *adaptive, "tree-auto"]
