# SPDX-License-Identifier: Apache-2.0
"""What all tree-aware metadata builders share: their runtime, their graphs and their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.attention.backend import AttentionCGSupport

from vllm_ddtree.round.runtime import Runtime

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec


def layer_runtime(builder: AttentionMetadataBuilder) -> Runtime:
    """The runtime of the engine a builder's layers belong to."""
    layers = builder.vllm_config.compilation_config.static_forward_context
    return layers[builder.layer_names[0]].impl.tree_runtime


def named_after(base: type, tree_aware: type) -> type:
    """The tree-aware form of a class, under the name of what it is made from."""
    tree_aware.__name__ = tree_aware.__qualname__ = f"Tree{base.__name__}"
    return tree_aware


def of_one_length(runtime: Runtime, common: CommonAttentionMetadata) -> bool:
    """Whether the step's rows are trees of one length (`Step.max_verify_len`), and nothing else.

    A graph's padded requests have no rows: its padding rows must be enough to be theirs.
    """
    length, num_reqs = runtime.step.max_verify_len, common.num_reqs
    if not length or runtime.step.has_plain_rows:
        return False
    lens = set(common.query_start_loc_cpu[: num_reqs + 1].diff().tolist())
    return lens <= {0, length} and num_reqs * length <= common.num_actual_tokens


class TreeRowGraphs:
    """Over a metadata builder: FULL graphs for tree rows only.

    Mixed batches run their attention outside.
    """

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda s: s.value)
