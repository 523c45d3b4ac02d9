# SPDX-License-Identifier: Apache-2.0
"""What a `CudaGraphManager` captures."""

from collections.abc import Callable
from typing import Any


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
