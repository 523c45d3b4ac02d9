# SPDX-License-Identifier: Apache-2.0
"""The drafter's weights over a level-2 sleep.

Level 2 throws all weights away. vLLM saves no more than buffers, and its `reload_weights` loads the
target alone, so a DFlash drafter wakes with whatever lies in its memory: its weights, and the
tensors made of them at load time (fused key and value projections), which no checkpoint holds. They
are small, so they are kept on the host while the engine sleeps.
"""

from collections.abc import Iterator
from typing import Any

import torch

_KEPT = "ddtree_kept"


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and other tensors of a model's modules, KV caches left out."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name == "kv_cache":
                continue
            values = value.values() if isinstance(value, dict) else value
            for one in values if isinstance(value, (dict, list, tuple)) else (value,):
                if isinstance(one, torch.Tensor) and not one.is_meta:
                    yield one


def _storages(model: torch.nn.Module) -> dict[int, torch.UntypedStorage]:
    """Memory of a model's tensors, by address."""
    storages = (tensor.untyped_storage() for tensor in _tensors(model))
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def keep(worker: Any, level: int) -> None:
    """Before a worker's level-2 sleep: copy what is the drafter's alone to the host."""
    runner = worker.model_runner
    draft = runner.get_draft_model()
    if level != 2 or draft is None:
        return
    targets = _storages(runner.get_model())
    kept = [s for address, s in _storages(draft).items() if address not in targets]
    setattr(worker, _KEPT, [(s, _bytes(s).to("cpu", copy=True)) for s in kept])


def restore(worker: Any, tags: list[str] | None) -> None:
    """After a worker has its weights' memory again: the drafter's as they were."""
    if tags is not None and "weights" not in tags:
        return
    for storage, saved in getattr(worker, _KEPT, ()):
        _bytes(storage).copy_(saved)
    setattr(worker, _KEPT, [])
