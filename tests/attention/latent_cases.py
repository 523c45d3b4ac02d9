# SPDX-License-Identifier: Apache-2.0
"""Tree-aware builders and implementations of vLLM's MLA backends, without an engine."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport

from vllm_ddtree.attention.kernels.launch import num_sms
from vllm_ddtree.attention.registry import BACKENDS
from vllm_ddtree.round.step import Step

from .tree_cases import Batch, Request

OWN_SPLIT = {
    "TRITON_MLA": (1, QueryLenSupport.SINGLE_ONLY),
    "FLASH_ATTN_MLA": (512, QueryLenSupport.VARLEN),
    "FLASHMLA": (128, QueryLenSupport.UNIFORM),
}


class Prefill:
    """Stands for the backend of prefills."""

    def get_name(self) -> str:
        return "FLASH_ATTN"

    def prepare_metadata(self, metadata: Any) -> None:
        self.metadata = metadata


def builder_base(backend: str) -> type:
    """vLLM's metadata builder of an MLA backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    kind: Any = AttentionBackendEnum[backend].get_class()
    return kind.get_builder_cls()


def make_builder(
    backend: str,
    rank: int,
    rope: int,
    num_heads: int,
    num_rows: int,
    *,
    block_size: int = 16,
    full_graphs: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A builder as after its __init__, which needs a whole vLLM configuration. `build` gives it a
    batch.

    num_rows  budget + 1
    """
    runtime = SimpleNamespace(num_rows=num_rows)
    layer = SimpleNamespace(impl=SimpleNamespace(tree_runtime=runtime))
    impl: Any = BACKENDS[backend].load()
    kind: Any = impl.tree_builder(builder_base(backend))
    builder = kind.__new__(kind)
    context = SimpleNamespace(static_forward_context={"layer": layer})
    threshold, support = own_split = OWN_SPLIT[backend]
    device = torch.empty(0).device
    vars(builder).update(
        runtime=runtime,
        vllm_config=SimpleNamespace(compilation_config=context),
        layer_names=["layer"],
        own_split=own_split,
        reorder_batch_threshold=threshold,
        query_len_support=support,
        device=device,
        use_pcp=False,
        dcp_world_size=1,
        dcp_local_block_size=1,
        dcp_virtual_block_size=1,
        dcp_manager=None,
        page_size=block_size,
        chunked_prefill_workspace=torch.empty(256, rank + rope),
        chunked_prefill_workspace_size=256,
        metadata_cls=lambda **fields: SimpleNamespace(**fields),
        model_config=SimpleNamespace(dtype=dtype, get_head_size=lambda: rank + rope),
        q_data_type=dtype,
        _prefill_backend=Prefill(),
        num_heads=num_heads,
        num_q_heads=num_heads,
        is_fp8_kvcache=False,
        mla_dims=SimpleNamespace(kv_lora_rank=rank, qk_rope_head_dim=rope),
        kv_cache_spec=SimpleNamespace(dtype=dtype, block_size=block_size),
        fa_aot_schedule=True,
        use_full_cuda_graph=full_graphs,
        max_cudagraph_size=2048,
        max_num_splits=32 if full_graphs else 0,
        scheduler_metadata=torch.zeros(8193, dtype=torch.int32),
    )
    return builder


def step_of(requests: list[Request]) -> Step:
    """As the model state makes it."""
    verifying = [request.query_len for request in requests if request.tail_len]
    return Step(
        has_trees=bool(verifying),
        max_verify_len=max(verifying, default=0),
        num_tree_rows=sum(request.tail_len for request in requests),
        has_plain_rows=any(r.query_len != r.tail_len for r in requests),
    )


def build(builder: Any, batch: Batch, step: Step, max_seq_len: int | None = None) -> Any:
    """The metadata of a batch."""
    builder.runtime.step = step
    builder.runtime.rows = SimpleNamespace(
        tail_lens=batch.tail_lens, prefix_lens=batch.prefix_lens, masks=batch.row_masks
    )
    lens = batch.query_start_loc.cpu()
    common = SimpleNamespace(
        num_reqs=len(batch.seq_lens),
        num_actual_tokens=batch.query.shape[0],
        max_query_len=int(lens.diff().max()),
        max_seq_len=max_seq_len or int(batch.seq_lens.max()),
        block_table_tensor=batch.block_table,
        slot_mapping=batch.slot_mapping,
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=lens,
        seq_lens=batch.seq_lens,
        dcp_local_seq_lens=None,
        seq_lens_cpu_upper_bound=batch.seq_lens.cpu(),
        causal=True,
        is_prefilling=None,
    )
    with torch.device("cpu"):  # vLLM's own tensors on the host
        return builder.build(0, common)


def make_impl(backend: str, rank: int, rope: int, scale: float) -> Any:
    """A tree-aware implementation as after its __init__."""
    kind: Any = BACKENDS[backend].load()
    impl = kind.__new__(kind)
    vars(impl).update(
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        scale=scale,
        kv_cache_dtype="auto",
        need_to_return_lse_for_decode=False,
        dcp_world_size=1,
        dcp_rank=0,
        _sm_count=num_sms(torch.empty(0).device),
    )
    return impl
