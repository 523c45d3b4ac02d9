# SPDX-License-Identifier: Apache-2.0
"""vLLM's offloading of KV blocks on the CPU engine: its scheduler's side, and copies of our own.

vLLM's copies need a GPU (v1/kv_offload/cpu/gpu_worker.py). These stand for the slowest ones that it
may make: a store reads a block when it is asked for and once more when it is reported done, and
both readings must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

if TYPE_CHECKING:
    from vllm import LLM


def config(**more: Any) -> dict[str, Any]:
    """`kv_transfer_config` of an engine that offloads to the host, generated tokens included."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostSpec",
            "spec_module_path": __name__,
            "cpu_bytes_to_use": 64 << 20,
            "offload_prompt_only": False,
            **more,
        },
    }


def over_files(folder: Path, role: str) -> dict[str, Any]:
    """`kv_transfer_config` of an engine that gives prompts' blocks over files, or takes them."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def drain(llm: LLM) -> None:
    """Let an engine end the step that asynchronous scheduling has begun for nobody."""
    for _ in range(3):
        llm.llm_engine.step()


class HostWorker(OffloadingWorker):
    """Copies between the engine's blocks and the host's, one block a chunk."""

    latest: HostWorker | None = None

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self.caches = [cache.tensor for cache in kv_caches.tensors]
        self.refs = kv_caches.group_data_refs
        self.host = [c.new_zeros(num_chunks, c.shape[1]) for c in self.caches]
        self.stores: dict[int, tuple[Any, Any]] = {}
        self.old: list[int] = []
        """Stores that were already there when vLLM last asked what is done."""
        self.done: list[int] = []
        self.num_stored = self.num_loaded = 0
        HostWorker.latest = self

    def _pages(self, device: Any, host: Any) -> Iterator[tuple[int, Any, Any]]:
        """(cache, engine's blocks, host's blocks) of a transfer."""
        first = 0
        for size, refs in zip(device.group_sizes, self.refs, strict=True):
            last = first + size
            for ref in refs:
                yield ref.tensor_idx, device.block_ids[first:last], host.block_ids[first:last]
            first = last
        assert first == len(device.block_ids) == len(host.block_ids)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """As vLLM calls it: engine to host."""
        for cache, blocks, chunks in self._pages(src_spec, dst_spec):
            self.host[cache][chunks] = self.caches[cache][blocks]
        self.num_stored += len(src_spec.block_ids)
        self.stores[job_id] = src_spec, dst_spec
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        """As vLLM calls it: host to engine."""
        for cache, blocks, chunks in self._pages(dst_spec, src_spec):
            self.caches[cache][blocks] = self.host[cache][chunks]
        self.num_loaded += len(dst_spec.block_ids)
        self.done.append(job_id)
        return True

    def _end(self, job_id: int) -> None:
        """A store is done: what it read has not changed meanwhile."""
        for cache, blocks, chunks in self._pages(*self.stores.pop(job_id)):
            assert torch.equal(self.host[cache][chunks], self.caches[cache][blocks]), (
                "a block has changed while it was stored"
            )
        self.done.append(job_id)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that are done: loads at once, stores a step after they were asked for."""
        self.wait(set(self.old))
        self.old = list(self.stores)
        done, self.done = self.done, []
        return [TransferResult(job, True) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        """End these stores now; vLLM is about to give their blocks away."""
        for job in job_ids & self.stores.keys():
            self._end(job)


class HostSpec(CPUOffloadingSpec):
    """vLLM's offload to the host, with `HostWorker`'s copies."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """As vLLM calls it, once in a worker."""
        assert self.blocks_per_chunk == 1
        return HostWorker(kv_caches, self.num_chunks)
