# SPDX-License-Identifier: Apache-2.0
"""Whether a DDTree configuration exists in this process, and who wants to know.

This module imports nothing, so that the lowest room may announce and the highest may listen.
"""

from collections.abc import Callable
from typing import Any

_listeners: list[Callable[[], None]] = []
_present = False


def is_ddtree(speculative_config: Any) -> bool:
    """Whether a speculative configuration is DDTree's; by name, so that it need not be imported."""
    return type(speculative_config).__name__ == "DDTreeConfig"


def when_present(callback: Callable[[], None]) -> None:
    """Call `callback` when a DDTree configuration comes to exist: at once if one exists already.

    Args:
        callback: a function of a module, since it travels with the configuration. It may be called
            again, for every further configuration.

    """
    if callback not in _listeners:
        _listeners.append(callback)
    if _present:
        callback()


def announce() -> None:
    """A DDTree configuration has come to exist in this process."""
    global _present
    _present = True
    for callback in _listeners:
        callback()


def listeners() -> list[Callable[[], None]]:
    """Who wants to know.

    A configuration is unpickled in a new process before vLLM loads the plugins there, and vLLM's
    EngineCore loads them only in the midst of its `__init__`. So the configuration brings the
    listeners along.
    """
    return list(_listeners)
