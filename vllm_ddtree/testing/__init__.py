# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests, the demo and the benchmarks. The plugin itself imports nothing of them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


def testbed() -> ModuleType | None:
    """The CPU test bed (`ddtree_testbed`, cpu/README.md) where this environment has one."""
    if importlib.util.find_spec("ddtree_testbed") is None:
        return None
    return importlib.import_module("ddtree_testbed")
