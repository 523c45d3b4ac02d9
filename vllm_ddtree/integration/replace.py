# SPDX-License-Identifier: Apache-2.0
"""How a function of vLLM is replaced and restored."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

MARK = "_vllm_ddtree_original"
"""Attribute of a replacement: the function that stood there before."""

_replaced: dict[str, tuple[Any, Any]] = {}
"""Target -> what stood there and what stands there now, as its owner holds them."""


def resolve(target: str) -> tuple[Any, str]:
    """The owner, a module or a class, of "module:name" or "module:Class.name", and the name.

    Raises:
        ImportError: there is no such module.
        AttributeError: there is no such class, or the owner itself does not define the name.

    """
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in classes:
        owner = getattr(owner, each)
    if name not in vars(owner):
        raise AttributeError(f"{owner!r} does not define {name!r}")
    return owner, name


def function_in(held: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The function in what an owner holds, and what makes the same of another function."""
    if isinstance(held, property):
        return held.fget, property
    if isinstance(held, (staticmethod, classmethod)):
        return held.__func__, type(held)
    return held, lambda function: function


def replace(
    target: str, make: Callable[[Callable[..., Any]], Any], users: Iterable[str] = ()
) -> None:
    """Replace a function by `make(function)`, once however often this is called.

    Args:
        target: "module:name" or "module:Class.name".
        make: (original) -> replacement.
        users: modules that import the function by name. Those that are loaded get the replacement,
            too; those that are not will find it.

    """
    owner, name = resolve(target)
    held = vars(owner)[name]
    function, wrap = function_in(held)
    if not hasattr(function, MARK):
        replacement = functools.update_wrapper(make(function), function)
        setattr(replacement, MARK, function)
        setattr(owner, name, wrap(replacement))
        _replaced[target] = held, vars(owner)[name]
    _pass_on(name, users, *_replaced.get(target, (None, None)))


def restore(target: str, users: Iterable[str] = ()) -> None:
    """Undo `replace`. What others have put in the replacement's place stays."""
    if target not in _replaced:
        return
    original, replacement = _replaced.pop(target)
    owner, name = resolve(target)
    if vars(owner)[name] is replacement:
        setattr(owner, name, original)
    _pass_on(name, users, replacement, original)


def _pass_on(name: str, users: Iterable[str], old: Any, new: Any) -> None:
    """Give the modules that have `old` under a name what is `new`."""
    for user in users:
        module = sys.modules.get(user)
        if module is not None and old is not None and vars(module).get(name) is old:
            setattr(module, name, new)
