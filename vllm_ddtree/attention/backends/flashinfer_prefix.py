# SPDX-License-Identifier: Apache-2.0
"""The prefix pass by FlashInfer's FA2 kernel.

FlashInfer plans on the host, and under asynchronous scheduling the host knows bounds of the lengths
only. A plan for other lengths than the kernel finds on the device is wrong, not only slow: its FA3
kernel reads as many keys as were planned, and where its FA2 kernel cuts long keys into chunks, it
lays their results out by the true number of chunks, and adds them up by the planned one
(include/flashinfer/attention/prefill.cuh, `num_kv_chunks`).

Here it plans rows only and cuts nothing (`disable_split_kv`), so a plan holds for every length, and
one is made for each number of requests and rows. The prefixes are cut on the device
(`kernels/segments.py`): a segment is a request of its own to FlashInfer, with copies of the tree's
rows, and the tail kernel adds the segments up.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from vllm.triton_utils import triton

from vllm_ddtree.attention.kernels.launch import num_sms
from vllm_ddtree.attention.kernels.prefix import choose_num_segments
from vllm_ddtree.attention.kernels.segments import MAX_SEGMENTS, SegmentTable
from vllm_ddtree.attention.metadata.plain import TreeMetadata

if TYPE_CHECKING:
    from vllm.v1.attention.backends.flashinfer import FlashInferMetadataBuilder

MAX_EAGER_PLANS = 64
"""Plans beside those of CUDA graphs: outside graphs, steps of every number of requests come."""


class PrefixPlan:
    """The prefix pass of `num_reqs` trees of `length` rows, each prefix in `segments`.

    Its kernels read `table`, filled for the step; planned once, it can lie in a CUDA graph.
    """

    def __init__(
        self,
        builder: FlashInferMetadataBuilder,
        table: SegmentTable,
        num_reqs: int,
        length: int,
        segments: int,
    ) -> None:
        self.num_reqs, self.length, self.segments = num_reqs, length, segments
        self.scale, self.soft_cap = builder.sm_scale, builder.logits_soft_cap or 0.0
        device, entries = table.starts.device, segments * num_reqs

        def on_device(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        no_results = on_device(256, torch.uint8)  # of chunks: none are cut
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            no_results,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=on_device(entries + 1, torch.int32),
            paged_kv_indptr_buf=table.starts[: entries + 1],
            paged_kv_indices_buf=table.pages,
            paged_kv_last_page_len_buf=table.last_lens[:entries],
            backend="fa2",
        )
        # FlashInfer's own would be 8 MiB. It holds three numbers and a flag a tile, of 16 (row,
        # head) pairs at least, or for each program of an idle GPU, and where each entry starts.
        tiles = entries * triton.cdiv(length * builder.num_qo_heads // builder.num_kv_heads, 16)
        plan_size = 13 * max(tiles + entries, 2 * num_sms(device)) + 4 * (entries + 1) + 1024
        self._wrapper.reset_workspace_buffer(no_results, on_device(plan_size, torch.uint8))
        zeros = torch.zeros(entries + 1, dtype=torch.int32, device="cpu")
        optional = {"uniform_q_len": length}  # FlashInfer 0.7: as many rows a tile as there are
        known = inspect.signature(self._wrapper.plan).parameters
        self._wrapper.plan(
            qo_indptr=torch.arange(entries + 1, dtype=torch.int32, device="cpu") * length,
            paged_kv_indptr=zeros,
            paged_kv_indices=table.pages[:0],
            paged_kv_last_page_len=zeros[1:],
            num_qo_heads=builder.num_qo_heads,
            num_kv_heads=builder.num_kv_heads,
            head_dim_qk=builder.head_dim,
            page_size=table.page_size,
            causal=False,
            sm_scale=self.scale,
            logits_soft_cap=self.soft_cap,
            q_data_type=builder.model_config.dtype,
            kv_data_type=builder.model_config.dtype,
            disable_split_kv=True,
            **{name: value for name, value in optional.items() if name in known},
        )

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the prefixes in the table.

        Args:
            query: [>= num_reqs * length, Hq, Dh].
            key_cache: [num_blocks, block_size, Hkv, Dh], any strides.
            value_cache: as key_cache.
            output: [>= num_reqs * length, Hq, Dh], overwritten.

        Returns:
            Output and log-sum-exp of every segment, as `tail_attention` takes them.

        """
        parts = (self.segments, self.num_reqs * self.length)
        query, out = query[: parts[1]], output[: parts[1]]
        if self.segments > 1:
            query = query.repeat(self.segments, 1, 1)
            out = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        self._wrapper.run(
            query,
            (key_cache, value_cache),
            out=out,
            lse=lse,
            return_lse=True,
            # It would read the table while the kernel before may be writing it.
            enable_pdl=False,
        )
        lse *= math.log(2)  # FlashInfer's are logarithms to base 2
        return out.unflatten(0, parts), lse.unflatten(0, parts).transpose(1, 2)


class PrefixPlans:
    """Plans of one KV group, made as they are needed, over one segment table."""

    def __init__(
        self, builder: FlashInferMetadataBuilder, max_num_reqs: int, max_pages: int
    ) -> None:
        self._builder = builder
        self._table = SegmentTable(max_num_reqs, max_pages, builder.page_size, builder.device)
        self._plans: dict[tuple[int, int], PrefixPlan] = {}
        self._num_eager = 0

    def get(self, num_reqs: int, length: int, in_graph: bool) -> PrefixPlan | None:
        """The plan for so many trees of so many rows; None: there are too many plans."""
        plan = self._plans.get((num_reqs, length))
        if plan is None and (in_graph or self._num_eager < MAX_EAGER_PLANS):
            plan = self._plans[num_reqs, length] = self.make(num_reqs, length)
            self._num_eager += not in_graph
        return plan

    def make(self, num_reqs: int, length: int) -> PrefixPlan:
        """A plan for so many trees of so many rows."""
        builder = self._builder
        segments = choose_num_segments(
            num_reqs,
            builder.num_kv_heads,
            length,
            builder.num_qo_heads // builder.num_kv_heads,
            num_sms(builder.device),
            MAX_SEGMENTS,
        )
        return PrefixPlan(builder, self._table, num_reqs, length, segments)

    def prepare(
        self, tree: TreeMetadata, length: int, block_table: torch.Tensor
    ) -> PrefixPlan | None:
        """The plan for a step of trees of `length` rows, its prefixes in the table."""
        plan = self.get(tree.prefix_lens.shape[0], length, tree.in_graph)
        if plan is not None:
            self._table.fill(block_table, tree.prefix_lens, plan.segments)
        return plan
