# SPDX-License-Identifier: Apache-2.0
"""Tree attention on vLLM's FlashInfer backend: FlashInfer's own kernel for the prefix, ours for the
tail.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.triton_utils import triton
from vllm.v1.attention.backends.flashinfer import FlashInferImpl

from vllm_ddtree.attention.backends.flashinfer_prefix import PrefixPlans
from vllm_ddtree.attention.forward.plain import tree_forward
from vllm_ddtree.attention.forward.triton_prefix import triton_prefix_pass
from vllm_ddtree.attention.kernels.scales import Scales
from vllm_ddtree.attention.layer import Variant
from vllm_ddtree.attention.metadata.builders import (
    TreeRowGraphs,
    layer_runtime,
    named_after,
    of_one_length,
)
from vllm_ddtree.attention.metadata.plain import TreeMetadata, tree_metadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.flashinfer import FlashInferMetadataBuilder
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class TreesOnly:
    """Metadata of a step in which vLLM's own attention has nothing to do."""

    num_actual_tokens: int
    """Rows of the batch."""
    slot_mapping: torch.Tensor
    """int64 [T], KV slot of each row."""


@functools.cache
def flashinfer_builder(base: type[FlashInferMetadataBuilder]) -> type[FlashInferMetadataBuilder]:
    """The tree-aware form of vLLM's builder. `prefix` of its metadata is the step's plan.

    vLLM's builder waits for the device's lengths where it does not use TensorRT-LLM's kernels; for
    a step of trees only it is not asked.
    """

    class TreeFlashInferMetadataBuilder(TreeRowGraphs, base):
        reorder_batch_threshold: int

        def __init__(
            self,
            kv_cache_spec: AttentionSpec,
            layer_names: list[str],
            vllm_config: VllmConfig,
            device: torch.device,
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            max_pages = triton.cdiv(vllm_config.model_config.max_model_len, self.page_size)
            max_num_reqs = vllm_config.scheduler_config.max_num_seqs
            self.plans = PrefixPlans(self, max_num_reqs, max_pages)
            # FlashInfer compiles its kernel with the first plan. It is not kept: what is allocated
            # here is lost in sleep mode, and a plan is not written anew.
            self.plans.make(1, layer_runtime(self).num_rows)

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
                plain = super().build(common_prefix_len, common, fast_build)
                plain.tree = None
                return plain
            metadata: Any = TreesOnly(common.num_actual_tokens, common.slot_mapping)
            if step.has_plain_rows:
                # Trees come first: the kernels for prefills take all rows, and none of those for
                # decodes, which are made for few, need take a tree's.
                own = self.reorder_batch_threshold
                self.reorder_batch_threshold = 1
                try:
                    metadata = super().build(common_prefix_len, common, fast_build)
                finally:
                    self.reorder_batch_threshold = own
            metadata.query_start_loc = common.query_start_loc
            metadata.block_table = common.block_table_tensor
            metadata.tree = tree_metadata(runtime, common)
            metadata.prefix = None
            if of_one_length(runtime, common):
                metadata.prefix = self.plans.prepare(
                    metadata.tree, step.max_verify_len, common.block_table_tensor
                )
            return metadata

    return named_after(base, TreeFlashInferMetadataBuilder)


class TreeFlashInferImpl(FlashInferImpl):
    """FlashInfer for prefixes of trees of one length (our Triton kernel for others, and with a
    sliding window) and for rows outside trees, our Triton kernel for the tail."""

    vllm_impl = FlashInferImpl
    tree_builder = staticmethod(flashinfer_builder)
    tree_variant = Variant()  # the layer's own takes its place
    plain_forward = FlashInferImpl.forward
    forward = tree_forward

    def prefix_pass(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        attn_metadata: Any,
        tree: TreeMetadata,
        output: torch.Tensor,
        scales: Scales | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `tree_forward`."""
        plan, variant = attn_metadata.prefix, self.tree_variant
        planned = plan is not None and (self.scale, variant.soft_cap) == (plan.scale, plan.soft_cap)
        if not planned or variant.window:
            return triton_prefix_pass(
                self, query, key_cache, value_cache, attn_metadata, tree, output, scales
            )
        return plan.run(query, key_cache, value_cache, output)
