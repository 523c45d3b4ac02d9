# SPDX-License-Identifier: Apache-2.0
"""The commit: the target's KV caches, and a step's accepted paths moved in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_ddtree.commit.kv import KVCompactor, make_compactors, with_heads

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_ddtree.round.runtime import Runtime

Compactors: TypeAlias = list[tuple[int, KVCompactor]]
"""(KV group, compactor of caches in it)."""


class TargetCaches:
    """The target's KV caches, by group.

    Args:
        kv_cache_config: vLLM's; which layers each KV group holds.
        target_layers: gives the target's attention layers by name, their caches bound.

    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, target_layers: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._groups = [
            (gid, list(group.layer_names))
            for gid, group in enumerate(kv_cache_config.kv_cache_groups)
        ]
        self._target_layers = target_layers
        self._compactors: Compactors | None = None

    @property
    def compactors(self) -> Compactors:
        """Compactors of all caches.

        They are made when first needed: vLLM also allocates a small cache to profile graphs, and
        drops it.
        """
        if self._compactors is None:
            layers = self._target_layers()
            self._compactors = []
            for gid, names in self._groups:
                caches = [with_heads(layers[name].kv_cache) for name in names if name in layers]
                self._compactors += [(gid, compactor) for compactor in make_compactors(caches)]
        return self._compactors

    def commit(self, runtime: Runtime) -> None:
        """Move the keys and values of the step's paths to the slots right after the root.

        A chain's rows lie there already.
        """
        step = runtime.step
        if step.as_chains:
            return
        assert step.slot_mappings is not None and step.query_start_loc is not None
        for gid, compactor in self.compactors:
            compactor.compact(
                step.slot_mappings[gid],
                step.query_start_loc,
                runtime.rows.tail_lens,
                runtime.paths,
                step.num_reqs,
            )
