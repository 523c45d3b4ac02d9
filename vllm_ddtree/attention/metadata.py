# SPDX-License-Identifier: Apache-2.0
"""The tree-aware attention metadata builder: what a backend's own builder makes, plus the tree.

`tree_builder(base)` subclasses any vLLM `AttentionMetadataBuilder`; its metadata carry a
`TreeMetadata` under the attribute `tree`. All tensors in it are persistent buffers of the engine's
runtime, written in place, so a replayed CUDA graph never sees a new one.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_ddtree import integration
from vllm_ddtree.round.runtime import Runtime


@dataclass
class TreeMetadata:
    """Tree part of one KV group's attention metadata for one step."""

    masks: torch.Tensor
    """[max_num_tokens, W] int32 ancestor bitmask by row."""
    positions: torch.Tensor
    """[max_num_tokens] int64, prefix_lens + depth of tree rows: what sliding windows count."""
    tail_lens: torch.Tensor
    """[num_reqs] int32, tree rows at the end of each request, 0 without a tree."""
    prefix_lens: torch.Tensor
    """[num_reqs] int32, keys before the tree rows, 0 without a tree."""
    max_tail: int
    """Upper bound of tail_lens: budget + 1, less where a batch schedules fewer nodes."""
    has_plain_rows: bool
    """Whether rows outside trees need the backend's own (causal) attention too."""
    in_graph: bool
    """Whether this is a CUDA graph's capture, which pays for kernels of its own once."""


def tree_metadata(runtime: Runtime, common: Any) -> TreeMetadata:
    """The tree part for the step in progress; common: vLLM's CommonAttentionMetadata."""
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


def of_one_length(runtime: Runtime, common: Any) -> bool:
    """Whether the step's rows are trees of one length (`Step.max_verify_len`), and nothing else.

    A graph's padded requests have no rows: its padding rows must be enough to be theirs.

    common  vLLM's CommonAttentionMetadata
    """
    length, num_reqs = runtime.step.max_verify_len, common.num_reqs
    if not length or runtime.step.has_plain_rows:
        return False
    lens = set(common.query_start_loc_cpu[: num_reqs + 1].diff().tolist())
    return lens <= {0, length} and num_reqs * length <= common.num_actual_tokens


def layer_runtime(builder: Any) -> Runtime:
    """The runtime of the engine a builder's layers belong to."""
    layers = builder.vllm_config.compilation_config.static_forward_context
    return layers[builder.layer_names[0]].impl.tree_runtime


def named_after(base: type, tree_aware: type) -> type:
    """The tree-aware form of a class, under the name of what it is made from."""
    tree_aware.__name__ = tree_aware.__qualname__ = f"Tree{base.__name__}"
    return tree_aware


class TreeRowGraphs:
    """Over a metadata builder: FULL graphs for tree rows only. Mixed batches run their attention
    outside."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda s: s.value)


@functools.cache
def tree_builder(base: type) -> type:
    """The tree-aware form of a backend's metadata builder class."""
    # FlashAttention plans its work ahead of the launch: for a batch of trees only, what it launches
    # is the prefix pass, so that is what its metadata must describe.
    plans_prefix = integration.plans_ahead(base)

    class TreeMetadataBuilder(TreeRowGraphs, base):
        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
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
