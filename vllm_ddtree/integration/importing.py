# SPDX-License-Identifier: Apache-2.0
"""Acting on a module once it is imported, in processes that may never import it.

An engine core and a worker read a finished configuration. They need not pay for the module that
makes one.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_waiting: dict[str, Callable[[], None]] = {}
"""Module -> what is called when it has been imported."""


class _Loader(Loader):
    """Loads a module as its own loader does, and calls back when it has run."""

    def __init__(self, own: Loader, callback: Callable[[], None]) -> None:
        self.own, self.callback = own, callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is what it would be without us.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.own
        try:
            self.own.exec_module(module)
        except BaseException:
            _waiting[module.__name__] = self.callback  # the import may be tried again
            raise
        self.callback()


class _Finder(MetaPathFinder):
    """Finds the modules that are waited for where Python finds them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        callback = _waiting.pop(name)
        spec = importlib.util.find_spec(name)  # of the other finders
        if spec is None or spec.loader is None:
            _waiting[name] = callback
            return None
        spec.loader = _Loader(spec.loader, callback)
        return spec


_finder = _Finder()


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Call `callback` once `module` is imported: at once if it is already.

    The parent package must be imported.

    Args:
        module: its whole name; one callback a module, a later one replaces an earlier.
        callback: must not raise.

    """
    if module in sys.modules:
        callback()
        return
    _waiting[module] = callback
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
