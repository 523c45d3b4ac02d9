# SPDX-License-Identifier: Apache-2.0
"""The tree-aware metadata builder: what a backend's own builder makes, plus the tree.

`tree_builder(base)` subclasses any vLLM `AttentionMetadataBuilder`; its metadata carry a
`TreeMetadata` under the attribute `tree`.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_ddtree import integration
from vllm_ddtree.attention.metadata.builders import TreeRowGraphs, layer_runtime, named_after
from vllm_ddtree.round.runtime import Runtime

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass
class TreeMetadata:
    """Tree part of one KV group's attention metadata for one step."""

    masks: torch.Tensor
    """int32 [max_num_tokens, W], ancestor bits by row."""
    positions: torch.Tensor
    """int64 [max_num_tokens], prefix_lens + depth of tree rows: what sliding windows count."""
    tail_lens: torch.Tensor
    """int32 [num_reqs], tree rows at the end of each request, 0 without a tree."""
    prefix_lens: torch.Tensor
    """int32 [num_reqs], keys before the tree rows, 0 without a tree."""
    max_tail: int
    """Upper bound of tail_lens: budget + 1, less where a batch schedules fewer nodes."""
    has_plain_rows: bool
    """Whether rows outside trees need the backend's own (causal) attention too."""
    in_graph: bool
    """Whether this is a CUDA graph's capture, which pays for kernels of its own once."""


def tree_metadata(runtime: Runtime, common: CommonAttentionMetadata) -> TreeMetadata:
    """The tree part for the step in progress."""
    step, rows = runtime.step, runtime.rows
    return TreeMetadata(
        masks=rows.masks,
        positions=rows.positions,
        tail_lens=rows.tail_lens[: common.num_reqs],
        prefix_lens=rows.prefix_lens[: common.num_reqs],
        max_tail=runtime.num_rows if step.has_plain_rows else int(common.max_query_len),
        has_plain_rows=step.has_plain_rows,
        in_graph=step.in_graph,
    )


@functools.cache
def tree_builder(base: type[AttentionMetadataBuilder]) -> type[AttentionMetadataBuilder]:
    """The tree-aware form of a backend's metadata builder class."""
    # FlashAttention plans its work ahead of the launch. For a batch of trees only, what it launches
    # is the prefix pass, so that is what its metadata must describe.
    plans_prefix = integration.plans_ahead(base)

    class TreeMetadataBuilder(TreeRowGraphs, base):
        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            common = common_attn_metadata
            runtime = layer_runtime(self)
            step = runtime.step
            if not step.has_trees:
                metadata = super().build(common_prefix_len, common, fast_build)
                metadata.tree = None
                return metadata
            if plans_prefix and not step.has_plain_rows:
                prefix_lens = runtime.rows.prefix_lens[: common.num_reqs]
                common = dataclasses.replace(common, seq_lens=prefix_lens, causal=False)
            metadata = super().build(common_prefix_len, common, fast_build)
            metadata.tree = tree_metadata(runtime, common)
            return metadata

    return named_after(base, TreeMetadataBuilder)
