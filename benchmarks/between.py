# SPDX-License-Identifier: Apache-2.0
"""What lies on the GPU between a round's last kernel and the next round's forward.

It is measured without a profiler, by CUDA events at both ends. Between them are the small kernels
of the next step's inputs and, if the host is late, the GPU's wait for it. Only steps whose forward
is a FULL graph are timed. The functions are sent to a worker of vLLM (`LLM.collective_rpc`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any


def start(worker: Any) -> None:
    """Begin to time a worker's rounds."""
    import torch

    runner, pairs = worker.model_runner, []
    last: list[Any] = []

    def now() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
        """Puts `around` in a method's place; returns what takes it away."""
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))
        return lambda: delattr(owner, name)

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if last:
            pairs.append((last.pop(), now()))
        return original(*args, **kwargs)

    def rest_of_round(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        last[:] = [now()]
        return result

    worker._ddtree_between = (
        pairs,
        [
            wrap(runner.cudagraph_manager, "run_fullgraph", forward),
            wrap(runner, "sample_tokens", rest_of_round),
        ],
    )


def stop(worker: Any) -> list[float]:
    """End it; microseconds between every two rounds."""
    import torch

    pairs, undo = worker._ddtree_between
    del worker._ddtree_between
    for take_away in undo:
        take_away()
    torch.cuda.synchronize()
    return [1e3 * end.elapsed_time(begin) for end, begin in pairs]


def spread(pauses: Sequence[float]) -> dict[str, float]:
    """Median, mean, ninth decile and number; nothing if there are fewer than two."""
    if len(pauses) < 2:
        return {}
    return {
        "median": round(statistics.median(pauses), 1),
        "mean": round(statistics.fmean(pauses), 1),
        "ninth decile": round(statistics.quantiles(pauses, n=10)[-1], 1),
        "rounds": len(pauses),
    }
