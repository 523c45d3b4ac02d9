# SPDX-License-Identifier: Apache-2.0
"""The recurrent layers of one target: what a step's trees need of them, and their commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.mamba_utils import get_mamba_groups

from vllm_ddtree.recurrent.blocks import StateBlocks
from vllm_ddtree.recurrent.capacity import max_tree_rows
from vllm_ddtree.recurrent.commit import StateCommit
from vllm_ddtree.recurrent.layer import StateLayer
from vllm_ddtree.recurrent.rows import BLOCK_ROWS, RecurrentRows, TreeStep, prepare_recurrent_rows
from vllm_ddtree.recurrent.stash import LayerStash, Stash

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.block_table import BlockTables

    from vllm_ddtree.recurrent.kinds import LayerKind
    from vllm_ddtree.round.layout import Layout
    from vllm_ddtree.round.runtime import Runtime


@dataclass(frozen=True)
class States:
    """The states that vLLM has allocated, and what works on them."""

    layers: dict[str, StateLayer]
    """By name, in the stash's order."""
    blocks: StateBlocks
    """The blocks of the step in progress."""
    commit: StateCommit
    """Of all layers."""


class RecurrentTarget:
    """All recurrent layers of a target, which are alike.

    Its buffers are made with it, before vLLM measures the memory that is left for KV blocks.

    Args:
        vllm_config: the engine's.
        layers: vLLM's layers by name.
        kind: of all of them.
        runtime: the engine's.
        device: of the worker.

    Raises:
        ValueError: layers of different shapes.

    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        layers: Mapping[str, MambaBase],
        kind: LayerKind,
        runtime: Runtime,
        device: torch.device,
    ) -> None:
        self.layers: dict[str, Any] = dict(layers)
        self._kind = kind
        self.runtime = runtime
        self._places = {name: place for place, name in enumerate(self.layers)}
        self._max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        first = next(iter(self.layers.values()))
        if (
            len({(layer.get_state_shape(), layer.get_state_dtype()) for layer in layers.values()})
            > 1
        ):
            raise ValueError("recurrent layers of different shapes")
        num_heads, value_dim, _ = first.get_state_shape()[1]
        width = first.conv1d.weight.shape[-1]
        rows = max_tree_rows(vllm_config)
        self.rows = RecurrentRows(rows, self._max_num_reqs, width, device)
        self._stash = Stash(
            len(layers),
            rows,
            first.conv1d.weight.shape[0],
            num_heads,
            first.get_state_dtype()[0],
            device,
        )
        self._updates = None
        if kind.solves and runtime.num_rows > BLOCK_ROWS:
            shape = (rows, num_heads, value_dim)
            self._updates = torch.empty(shape, dtype=torch.float32, device=device)
        self._tables: list[torch.Tensor] = []
        self._block_size: int | None = None
        self._groups: dict[str, int] = {}
        self._states: States | None = None

    @property
    def words(self) -> str:
        """What the layers' memory costs, for the start-up line."""
        return (
            f"{len(self.layers)} recurrent layers, {self.state_bytes / 2**20:.1f} MiB of states a "
            f"request, {self.stash_bytes / 2**20:.0f} MiB for {self.rows.max_tree_rows} tree rows"
        )

    @property
    def state_bytes(self) -> int:
        """Of one request, in all layers."""
        first = next(iter(self.layers.values()))
        shapes = zip(first.get_state_shape(), first.get_state_dtype(), strict=True)
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
        return sum(sizes) * len(self.layers)

    @property
    def stash_bytes(self) -> int:
        """What is kept of a step's tree rows, in all layers."""
        buffers = [self._stash.inputs, self._stash.gates, self._updates]
        return sum(t.numel() * t.element_size() for t in buffers if t is not None)

    def bind(self, kv_cache_config: KVCacheConfig, block_tables: BlockTables) -> None:
        """Note where the states are that vLLM has allocated: at first few, to measure graphs, then
        all.

        Raises:
            ValueError: blocks of states are smaller than a tree.

        """
        groups = [
            (gid, [name for name in group.layer_names if name in self.layers])
            for gid, group in enumerate(kv_cache_config.kv_cache_groups)
        ]
        groups = [(gid, names) for gid, names in groups if names]
        self._groups = {name: row for row, (_, names) in enumerate(groups) for name in names}
        spec = next(iter(get_mamba_groups(kv_cache_config)))
        aligned = spec.mamba_cache_mode == "align"
        if aligned and spec.block_size <= self.runtime.num_rows:
            raise ValueError(
                f"method ddtree does not support prefix caching with blocks of {spec.block_size} "
                f"tokens and trees of {self.runtime.num_rows} rows: lower budget, raise "
                "--block-size, or set --no-enable-prefix-caching"
            )
        self._tables = [block_tables.input_block_tables[gid] for gid, _ in groups]
        self._block_size = spec.block_size if aligned else None
        self._states = None

    @property
    def states(self) -> States:
        """The states, and what works on them.

        Made when first needed, not when they are bound: what is made there lies in the memory that
        a sleeping engine gives back, and pointers would not be there when it wakes.
        """
        if self._states is None:
            views = {name: self._kind.view(layer) for name, layer in self.layers.items()}
            groups = [self._groups[name] for name in self.layers]
            self._states = States(
                views,
                StateBlocks(self._tables, self._block_size, self._max_num_reqs),
                StateCommit(list(views.values()), self._stash, groups),
            )
        return self._states

    @property
    def num_blocks(self) -> int:
        """Blocks of states that vLLM has allocated, its null block included."""
        return next(iter(self.states.layers.values())).states.shape[0]

    @property
    def blocks(self) -> StateBlocks:
        """The blocks of the step in progress."""
        return self.states.blocks

    def prepare(
        self, layout: Layout, seq_lens: torch.Tensor, num_reqs_padded: int, fitted: bool
    ) -> None:
        """Fill what the layers read of the step's trees and blocks.

        Args:
            layout: requests of the batch.
            seq_lens: int32 [num_reqs or more], tokens of each request, the step's included.
            num_reqs_padded: requests of the batch and a graph's padding.
            fitted: whether the scheduler has seen to it that the trees fit.

        """
        if not self._tables:
            return  # vLLM's first dummy step comes before there are states
        rt = self.runtime
        prepare_recurrent_rows(
            rt.trees,
            self.rows,
            layout.indices,
            rt.rows.tail_lens,
            layout.num_reqs,
            rt.step.num_tree_rows,
            num_reqs_padded,
            cut=not fitted,
        )
        if rt.step.in_graph:
            # vLLM's dummy blocks are its null block, for which nothing would be done.
            self.blocks.use(min(1, self.num_blocks - 1))
        else:
            self.blocks.find(seq_lens, layout.num_reqs, num_reqs_padded)

    def tree_step(self, name: str, common: CommonAttentionMetadata) -> TreeStep:
        """The trees of the step in progress, for the KV group of a layer.

        Args:
            name: the layer's.
            common: vLLM's metadata of the batch.

        """
        rt = self.runtime
        return TreeStep(
            rows=self.rows,
            masks=rt.rows.masks,
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            tail_lens=self.rows.lens,
            state_indices=self.state_indices(name),
            max_tail=rt.num_rows if rt.step.has_plain_rows else int(common.max_query_len),
            max_depth=rt.max_depth,
        )

    def state_indices(self, name: str) -> torch.Tensor:
        """int32 [max_num_reqs], block of each request's states in the KV group of a layer."""
        return self.blocks.indices[self._groups[name]]

    def of_layer(self, name: str) -> tuple[StateLayer, LayerStash, torch.Tensor | None]:
        """A layer's tensors, its stash, and scratch for large trees."""
        return self.states.layers[name], self._stash[self._places[name]], self._updates

    def commit(self) -> None:
        """Move the states of the step's requests on along their paths. Chains are trees here."""
        rt = self.runtime
        if rt.step.num_tree_rows == 0:
            return
        num_reqs, paths = rt.step.num_reqs, rt.paths
        moves = self.blocks.moves(rt.rows.prefix_lens, self.rows.lens, paths.lens, num_reqs)
        self.states.commit.commit(
            self.rows,
            self.blocks.indices,
            self.rows.lens,
            paths.rows,
            paths.lens,
            num_reqs,
            moves,
        )
