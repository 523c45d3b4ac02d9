# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, so that several can live side by side and take turns.

vLLM keeps one set of metrics a process: two engines in one would count together.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self


class EngineProcess:
    """A process that opens an engine when told and calls functions with it.

    Args:
        opens: context manager function that gives the engine, found by name in the new process.
        args, kwargs: its arguments.

    Leaving it as a context manager closes the engine and ends the process.
    """

    def __init__(
        self, opens: Callable[..., AbstractContextManager[Any]], *args: Any, **kwargs: Any
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, opens, args, kwargs))
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def open(self) -> None:
        """Opens the engine; raises RuntimeError with what went wrong in the other process."""
        self._ask(None)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(engine, *args) there. Raises RuntimeError with what went wrong."""
        return self._ask((function, args))

    def _ask(self, message: Any) -> Any:
        self.pipe.send(message)
        try:
            error, result = self.pipe.recv()
        except EOFError:
            raise RuntimeError("the engine's process ended") from None
        if error:
            raise RuntimeError(error)
        return result

    def __exit__(self, *error: object) -> None:
        self.pipe.close()
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()


def _serve(pipe: Any, opens: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """The other process: the first message opens the engine, each later one is a call."""
    import traceback

    from vllm_ddtree.testing import testbed

    if bed := testbed():
        bed.prepare()
    import vllm  # noqa: F401 - takes long; all do it at once

    try:
        pipe.recv()
        with opens(*args, **kwargs) as engine:
            pipe.send((None, None))
            while True:
                function, arguments = pipe.recv()
                pipe.send((None, function(engine, *arguments)))
    except EOFError:
        pass  # the one who asks has left
    except Exception:
        pipe.send((traceback.format_exc(), None))
