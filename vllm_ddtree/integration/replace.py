# SPDX-License-Identifier: Apache-2.0
"""How a function of vLLM is replaced: once, and so that the original can be called."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

_MARK = "_vllm_ddtree_original"


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)`, once however often it is called."""
    original = owner.__dict__[name]
    target: Any = original
    wrap: Callable[[Any], Any] = lambda function: function  # noqa: E731
    if isinstance(original, property):
        target, wrap = original.fget, property
    elif isinstance(original, staticmethod):
        target, wrap = original.__func__, staticmethod
    if hasattr(target, _MARK):
        return
    replacement = make(target)
    functools.update_wrapper(replacement, target)
    setattr(replacement, _MARK, target)
    setattr(owner, name, wrap(replacement))


def replace_in_module(defining: str, users: tuple[str, ...], name: str, make: Any) -> None:
    """Replace a function in its module and where it was imported by name."""
    module = importlib.import_module(defining)
    original = getattr(module, name)
    if not hasattr(original, _MARK):
        replacement = functools.wraps(original)(make(original))
        setattr(replacement, _MARK, original)
        setattr(module, name, replacement)
    replacement = getattr(module, name)
    for user in users:
        loaded = sys.modules.get(user)
        if loaded is not None and hasattr(loaded, name):
            setattr(loaded, name, replacement)
