# SPDX-License-Identifier: Apache-2.0
"""The drafter's weights over a level-2 sleep.

vLLM, v1/worker/gpu_worker.py, `Worker.sleep`: level 2 throws all weights away and saves no more
than buffers. `GPUModelRunner.reload_weights` (v1/worker/gpu/model_runner.py) loads the target
alone. So a DFlash drafter wakes with whatever lies in its memory. That is also so for tensors that
no checkpoint holds, which are made at load time (fused key and value projections). All of them are
small, so they are kept on the host while the engine sleeps.

It can go when vLLM restores a drafter, with the tensors made at load time, after a level-2 sleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

_KEPT = "ddtree_kept"


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and other tensors of a model's modules, without KV caches."""
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


def keep(worker: Worker, level: int) -> None:
    """Before a worker's level-2 sleep: copy the drafter's own tensors to the host."""
    runner = worker.model_runner
    draft = runner.get_draft_model()
    if level != 2 or draft is None:
        return
    targets = _storages(runner.get_model())
    kept = [s for address, s in _storages(draft).items() if address not in targets]
    setattr(worker, _KEPT, [(s, _bytes(s).to("cpu", copy=True)) for s in kept])


def restore(worker: Worker, tags: list[str] | None) -> None:
    """After a worker has its weights' memory again: bring the drafter's tensors back."""
    if tags is not None and "weights" not in tags:
        return
    for storage, saved in getattr(worker, _KEPT, ()):
        _bytes(storage).copy_(saved)
    setattr(worker, _KEPT, [])
