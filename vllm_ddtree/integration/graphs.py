# SPDX-License-Identifier: Apache-2.0
"""What a `CudaGraphManager` captures, and on which stream."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from vllm_ddtree.integration.replace import replace, replace_in_module


def full_graphs(manager: Any) -> list[Any]:
    """The descriptors of a manager's FULL graphs: the list that it captures from."""
    from vllm.config.compilation import CUDAGraphMode

    return manager._capture_descs.get(CUDAGraphMode.FULL, [])


def estimates_memory(manager: Any) -> bool:
    """Whether a manager captures a few graphs, multiplies their memory by the number of all, and is
    then thrown away."""
    return manager._max_full_descs_to_capture is not None


def capture_apart(manager: Any, wanted: list[Any], capture: Callable[[], None]) -> dict[Any, Any]:
    """Capture FULL graphs once more, beside the manager's own.

    Args:
        manager: its graphs captured.
        wanted: descriptors.
        capture: captures every graph that the manager describes.

    Returns:
        The graphs, by descriptor.

    """
    from vllm.config.compilation import CUDAGraphMode

    described, graphs = manager._capture_descs, manager.graphs
    manager._capture_descs, manager.graphs = {CUDAGraphMode.FULL: wanted}, {}
    try:
        capture()
        return manager.graphs
    finally:
        manager._capture_descs, manager.graphs = described, graphs


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


def hook_capture(is_ddtree: Callable[[Any], bool]) -> None:
    """Let a DDTree runner that has its model to itself capture its graphs in a `CaptureScope`.

    With several ranks vLLM's context also registers the buffers of its all-reduce when it ends,
    graph manager by graph manager: that is left as it is.

    Args:
        is_ddtree: whether a speculative config is DDTree's.

    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    shared = CaptureScope()

    def wanted(config: Any) -> bool:
        return config.parallel_config.world_size == 1 and is_ddtree(config.speculative_config)

    utils = "vllm.v1.worker.gpu.cudagraph_utils"
    replace_in_module(utils, (), "graph_capture", shared.graph_capture)
    replace(GPUModelRunner, "capture_model", lambda method: shared.capture_model(method, wanted))
