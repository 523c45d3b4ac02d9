# SPDX-License-Identifier: Apache-2.0
"""The metadata of recurrent layers for steps with trees.

vLLM's builders (v1/attention/backends/gdn_attn.py, mamba2_attn.py) make them for rows outside
trees, as if the batch had no other; a step without trees is left to them altogether. For vLLM's own
chains they would give every draft token a block of states; they are never asked to.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder

from vllm_ddtree.recurrent.rows import TreeStep

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionMetadataBuilder,
        CommonAttentionMetadata,
    )
    from vllm.v1.kv_cache_interface import MambaSpec

    from vllm_ddtree.recurrent.target import RecurrentTarget


@dataclass
class TreeStateMetadata(GDNAttentionMetadata):
    """Metadata of a step with trees: of vLLM's fields only the counts, which are 0."""

    tree: TreeStep | None = None
    """The step's trees."""
    plain: Any = None
    """vLLM's metadata of the rows outside trees; None: there are none."""
    plain_rows: torch.Tensor | None = None
    """int64 [n], these rows in the batch."""


def tree_metadata(name: str) -> TreeStateMetadata | None:
    """A layer's metadata in the forward in progress; None: the step has no trees, or no metadata
    at all.
    """
    all_metadata = get_forward_context().attn_metadata
    metadata = all_metadata.get(name) if isinstance(all_metadata, dict) else None
    return metadata if isinstance(metadata, TreeStateMetadata) else None


@contextmanager
def plain_rows_alone(name: str, metadata: TreeStateMetadata) -> Iterator[None]:
    """Within, a layer's metadata are vLLM's, of a batch of the rows outside trees."""
    all_metadata = get_forward_context().attn_metadata
    assert isinstance(all_metadata, dict)
    all_metadata[name] = metadata.plain
    try:
        yield
    finally:
        all_metadata[name] = metadata


@dataclass(frozen=True)
class PlainPart:
    """The requests of a step that have rows outside trees, and these rows."""

    reqs: np.ndarray
    """int [n], places in the batch."""
    lens: np.ndarray
    """int [n], rows of each outside its tree: they come first."""
    starts: np.ndarray
    """int [n], first row of each in the batch."""

    @classmethod
    def of(cls, num_rows: np.ndarray, tree_lens: np.ndarray) -> PlainPart:
        """Those of a batch.

        Args:
            num_rows: int [num_reqs], rows of each request.
            tree_lens: int [num_reqs], its tree rows.

        """
        lens = num_rows - tree_lens
        reqs = np.flatnonzero(lens)
        return cls(reqs, lens[reqs], (np.cumsum(num_rows) - num_rows)[reqs])

    @property
    def rows(self) -> np.ndarray:
        """int [sum of lens], the rows in the batch."""
        before = np.cumsum(self.lens) - self.lens
        return np.arange(self.lens.sum()) + np.repeat(self.starts - before, self.lens)


def plain_metadata(
    common: CommonAttentionMetadata,
    part: PlainPart,
    tree_lens: np.ndarray,
    rows: torch.Tensor,
    reqs: torch.Tensor,
) -> CommonAttentionMetadata:
    """vLLM's metadata of a batch that has the rows outside trees alone.

    Args:
        common: of the whole batch.
        part: the rows outside trees.
        tree_lens: int [num_reqs], tree rows of each request.
        rows: `part.rows` on the device.
        reqs: `part.reqs` on the device.

    """
    starts = np.concatenate([[0], np.cumsum(part.lens)]).astype(np.int32)
    tails = torch.from_numpy(tree_lens[part.reqs].astype(np.int32))
    on_host = torch.from_numpy(part.reqs)
    device = common.seq_lens.device

    def of_host(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[on_host]

    upper = of_host(common.seq_lens_cpu_upper_bound)
    return common.replace(
        query_start_loc=async_tensor_h2d(starts, device=device),
        query_start_loc_cpu=torch.from_numpy(starts),
        seq_lens=common.seq_lens[reqs] - async_tensor_h2d(tails, device=device),
        seq_lens_cpu_upper_bound=None if upper is None else upper - tails,
        num_reqs=len(part.reqs),
        num_actual_tokens=len(rows),
        max_query_len=int(part.lens.max()),
        block_table_tensor=common.block_table_tensor[reqs],
        slot_mapping=common.slot_mapping[rows],
        is_prefilling=of_host(common.is_prefilling),
        positions=None,
        rswa_prefix_lens=None,
        req_idx=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


@functools.cache
def tree_builder(base: type[AttentionMetadataBuilder]) -> type[AttentionMetadataBuilder]:
    """The tree-aware form of vLLM's builder of a recurrent layer's metadata."""
    # This builder takes short prefills for vLLM's chains where there is speculation, and finds a
    # request's block from its length.
    by_length = issubclass(base, BaseMambaAttentionMetadataBuilder)

    class TreeStateBuilder(base):
        def __init__(
            self,
            kv_cache_spec: MambaSpec,
            layer_names: list[str],
            vllm_config: VllmConfig,
            device: torch.device,
        ) -> None:
            alone = vllm_config
            if by_length:
                alone = copy.copy(vllm_config)
                alone.speculative_config = None
            super().__init__(kv_cache_spec, layer_names, alone, device)
            if by_length:
                # Where states inside a prompt are cached depends on the speculation.
                self.checkpoint_builder.vllm_config = vllm_config
            # Trees of another KV group have other blocks.
            self.supports_update_block_table = False

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            num_accepted_tokens: torch.Tensor | None = None,
            num_decode_draft_tokens_cpu: torch.Tensor | None = None,
            fast_build: bool = False,
        ) -> Any:
            common = common_attn_metadata
            name = self.layer_names[0]
            layers = self.vllm_config.compilation_config.static_forward_context
            target: RecurrentTarget = layers[name].tree_target
            step = target.runtime.step
            if step.num_tree_rows == 0:
                return super().build(common_prefix_len, common, fast_build=fast_build)
            metadata = _empty(common.num_actual_tokens)
            metadata.tree = target.tree_step(name, common)
            if step.has_plain_rows and not step.in_graph:
                assert step.tree_lens is not None
                num_rows = common.query_start_loc_cpu.diff().numpy()[: len(step.tree_lens)]
                part = PlainPart.of(num_rows, step.tree_lens)
                device = common.seq_lens.device
                indices = async_tensor_h2d(part.rows, device=device)
                reqs = async_tensor_h2d(part.reqs, device=device)
                plain = plain_metadata(common, part, step.tree_lens, indices, reqs)
                # Rows before a tree work in the block of the request's last row.
                blocks = target.state_indices(name)[reqs][:, None]
                if by_length:
                    table = plain.block_table_tensor
                    before_tree = target.rows.lens[reqs][:, None] > 0
                    plain.block_table_tensor = torch.where(before_tree, blocks, table)
                    metadata.plain = super().build(0, plain, fast_build=fast_build)
                else:
                    self.mamba_aligned_state_indices = blocks
                    metadata.plain = super().build(0, plain, fast_build=fast_build)
                    del self.mamba_aligned_state_indices
                metadata.plain_rows = indices
            return metadata

        def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
            return self.build(0, common_attn_metadata)

    TreeStateBuilder.__name__ = TreeStateBuilder.__qualname__ = f"Tree{base.__name__}"
    return TreeStateBuilder


def _empty(num_tokens: int) -> TreeStateMetadata:
    return TreeStateMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=num_tokens,
    )


@functools.cache
def tree_backend(base: type[AttentionBackend]) -> type[AttentionBackend]:
    """The tree-aware form of vLLM's backend of recurrent layers; it keeps the name."""

    class TreeStateBackend(base):
        @staticmethod
        def get_builder_cls() -> type:
            return tree_builder(base.get_builder_cls())

    TreeStateBackend.__name__ = TreeStateBackend.__qualname__ = f"Tree{base.__name__}"
    return TreeStateBackend
