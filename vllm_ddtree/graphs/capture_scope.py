# SPDX-License-Identifier: Apache-2.0
"""The stream on which a runner captures its graphs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class CaptureScope:
    """One stream for all graphs that a runner captures.

    vLLM's managers capture into one memory pool, each on a stream of its own. What one graph frees,
    the next one takes, but on the same stream alone, so that the peak of every manager would stay
    allocated: of drafts of 2048 tokens 1.5 GiB each, the splits of FlashAttention.
    """

    def __init__(self) -> None:
        self._stack: ExitStack | None = None
        self._context: Any = None

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Within, what the first `graph_capture` has made serves the others, too."""
        import torch

        try:
            with ExitStack() as self._stack:
                yield
                if self._context is not None:
                    # What was written between two captures was written on their stream.
                    torch.accelerator.synchronize()
        finally:
            self._stack = self._context = None

    def graph_capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of vLLM's context manager of that name."""

        @contextmanager
        def capture(*args: Any, **kwargs: Any) -> Iterator[Any]:
            if self._stack is None:
                with original(*args, **kwargs) as context:
                    yield context
                return
            if self._context is None:
                self._context = self._stack.enter_context(original(*args, **kwargs))
            yield self._context

        return capture

    def capture_model(
        self, original: Callable[..., int], wanted: Callable[[Any], bool]
    ) -> Callable[..., int]:
        """The replacement of a runner's method of that name, if its VllmConfig is wanted."""

        def capture(runner: Any, *args: Any, **kwargs: Any) -> int:
            if not wanted(runner.vllm_config):
                return original(runner, *args, **kwargs)
            with self.scope():
                return original(runner, *args, **kwargs)

        return capture
