# SPDX-License-Identifier: Apache-2.0
"""The tree-aware metadata builder of multi-head latent attention.

vLLM splits such a batch by the requests' lengths (model_executor/layers/attention/
mla_attention.py). The short ones in front are "decodes" and attend to the latent cache itself
(`forward_mqa`). The others are prefills.

Model Runner V2 puts requests with drafts first (`sort_batch_req_ids`), so a threshold of a tree's
rows makes decodes of all trees, of whatever length. It makes decodes of the short prefills behind
them, too. A step without trees is split as vLLM splits it, for vLLM's own kernel. TRITON_MLA's,
which takes single rows only here, leaves the short prefills to ours.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAMetadataBuilder

from vllm_ddtree.attention.metadata.builders import TreeRowGraphs, layer_runtime, named_after

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class Tail:
    """Rows at the end, or in front of the end, of each request of a batch; see `latent_tail`."""

    ends: torch.Tensor
    """int32 [num_reqs], row after the last of the tail."""
    lens: torch.Tensor
    """int32 [num_reqs], rows of the tail, 0 without one."""
    prefix_lens: torch.Tensor
    """int32 [num_reqs], keys before the tail."""
    max_len: int
    """Upper bound of lens."""
    masks: torch.Tensor | None
    """int32 [max_num_tokens, W], ancestor bits by row; None: causal."""


@functools.cache
def latent_tree_builder(base: type[MLACommonMetadataBuilder]) -> type[MLACommonMetadataBuilder]:
    """The tree-aware form of an MLA backend's metadata builder class.

    Its metadata carry `tails`: the rows of trees and the other rows of the decodes, or None if the
    backend's own kernel serves all decodes.
    """
    # vLLM would reserve its scratch for as many rows as a tree has.
    single_rows = issubclass(base, TritonMLAMetadataBuilder)

    class LatentTreeMetadataBuilder(TreeRowGraphs, base):
        if single_rows:
            query_len_support = QueryLenSupport.SINGLE_ONLY

        def __init__(
            self,
            kv_cache_spec: AttentionSpec,
            layer_names: list[str],
            vllm_config: VllmConfig,
            device: torch.device,
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self.layer_names = layer_names
            self.own_split = self.reorder_batch_threshold, self.query_len_support

        def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
            return self.build(0, common_attn_metadata)

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            common = common_attn_metadata
            runtime = layer_runtime(self)
            step, rows = runtime.step, runtime.rows
            if step.max_verify_len or single_rows:
                self.reorder_batch_threshold = max(runtime.num_rows, step.max_verify_len)
                self.query_len_support = QueryLenSupport.VARLEN
            else:
                self.reorder_batch_threshold, self.query_len_support = self.own_split
            metadata = super().build(common_prefix_len, common, fast_build)
            metadata.tails = None
            num_reqs = metadata.num_decodes
            single = metadata.num_decode_tokens == num_reqs or common.max_query_len == 1
            own = single or not single_rows
            if num_reqs == 0 or (own and not step.max_verify_len):
                return metadata
            ends = common.query_start_loc[1 : num_reqs + 1]
            tree_lens = rows.tail_lens[:num_reqs]
            tails = []
            if step.max_verify_len:
                max_len = runtime.num_rows if step.has_plain_rows else int(common.max_query_len)
                tails.append(
                    Tail(ends, tree_lens, rows.prefix_lens[:num_reqs], max_len, rows.masks)
                )
            if step.has_plain_rows and metadata.num_decode_tokens > step.num_tree_rows:
                plain_ends = ends - tree_lens
                lens = plain_ends - common.query_start_loc[:num_reqs]
                # A prefix pass may go over all requests, and need not read for those without rows.
                prefix_lens = (common.seq_lens[:num_reqs] - tree_lens - lens) * (lens > 0)
                max_len = min(int(common.max_query_len), self.reorder_batch_threshold)
                tails.append(Tail(plain_ends, lens, prefix_lens, max_len, None))
            metadata.tails = tails
            return metadata

    return named_after(base, LatentTreeMetadataBuilder)
