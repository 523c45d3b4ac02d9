# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged prefill in plain PyTorch, for machines without it.

It reads lengths and pages where the kernel does, on the device, and rows and their places where
they were planned, on the host; it goes wrong where the kernel would.
"""

import importlib
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch


class Wrapper:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper` on the backend fa2, inside CUDA graphs."""

    plans_made = 0

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        qo_indptr_buf: torch.Tensor,
        paged_kv_indptr_buf: torch.Tensor,
        paged_kv_indices_buf: torch.Tensor,
        paged_kv_last_page_len_buf: torch.Tensor,
        backend: str,
    ) -> None:
        # Its kernel for Hopper, fa3, would read as many keys as were planned.
        assert (kv_layout, use_cuda_graph, backend) == ("NHD", True, "fa2")
        self.rows, self.starts = qo_indptr_buf, paged_kv_indptr_buf
        self.pages, self.last_lens = paged_kv_indices_buf, paged_kv_last_page_len_buf
        self.num_entries = len(qo_indptr_buf) - 1
        assert len(self.starts) == self.num_entries + 1
        assert len(self.last_lens) == self.num_entries
        for buffer in (self.rows, self.starts, self.pages, self.last_lens):
            assert buffer.dtype == torch.int32 and buffer.is_contiguous()
        self.int_size = 8 << 20

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        self.int_size = int_workspace_buffer.nbytes

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool,
        uniform_q_len: int,
    ) -> None:
        # Results of chunks would lie by the device's lengths and be added up by the host's.
        assert disable_split_kv and not causal
        assert qo_indptr.device.type == paged_kv_indptr.device.type == "cpu"
        self.planned = qo_indptr.tolist()
        lens = {b - a for a, b in zip(self.planned, self.planned[1:], strict=False)}
        assert lens == {uniform_q_len}
        # scheduler.cuh: three numbers and a flag a tile, the rows' places, and alignment.
        tiles = self.num_entries * -(-uniform_q_len * (num_qo_heads // num_kv_heads) // 16)
        assert 13 * tiles + 4 * (self.num_entries + 1) + 8 * 16 <= self.int_size
        self.rows.copy_(qo_indptr)
        self.starts.copy_(paged_kv_indptr)
        self.last_lens.copy_(paged_kv_last_page_len)
        self.page_size, self.scale, self.soft_cap = page_size, sm_scale, logits_soft_cap
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type)
        Wrapper.plans_made += 1

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        return_lse: bool,
        enable_pdl: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = paged_kv_cache
        heads, kv_heads, head_dim = q.shape[1], keys.shape[2], q.shape[2]
        assert self.shape == (heads, kv_heads, head_dim, q.dtype, keys.dtype)
        assert q.shape[0] == self.planned[-1] and keys.shape[1] == self.page_size
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        assert out.shape == q.shape and out.is_contiguous()
        assert lse.shape == q.shape[:2] and lse.is_contiguous() and lse.dtype == torch.float32
        starts, last_lens = self.starts.tolist(), self.last_lens.tolist()
        for entry in range(self.num_entries):
            first, end = starts[entry], starts[entry + 1]
            num_keys = (end - first - 1) * self.page_size + last_lens[entry] if end > first else 0
            rows = slice(self.rows[entry], self.rows[entry + 1])
            place = slice(self.planned[entry], self.planned[entry + 1])
            out[place], lse[place] = self.attend(
                q[rows], keys, values, self.pages[first:end].long(), num_keys
            )
        return out, lse

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: torch.Tensor,
        num_keys: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [n, Hq, Dh] and log-sum-exp [n, Hq], base 2."""
        if num_keys == 0:
            return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, device=q.device)
        group = q.shape[1] // keys.shape[2]
        k, v = (
            cache[pages].flatten(0, 1)[:num_keys].repeat_interleave(group, dim=1)
            for cache in (keys, values)
        )
        scores = torch.einsum("nhd,mhd->nhm", q, k) * self.scale
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        out = torch.einsum("nhm,mhd->nhd", scores.softmax(-1), v)
        return out, scores.logsumexp(-1) / math.log(2)


class _Module(ModuleType):
    """Has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the wrapper where our implementation finds it, which can then be imported."""
    if "vllm_ddtree.attention.backends.flashinfer" not in sys.modules:
        try:
            import flashinfer  # noqa: F401
        except ImportError:
            for name in ("flashinfer", *map("flashinfer.".__add__, ("decode", "prefill", "utils"))):
                module = _Module(name)
                module.__spec__ = ModuleSpec(name, None)
                patch.setitem(sys.modules, name, module)
    importlib.import_module("vllm_ddtree.attention.backends.flashinfer")
    from vllm_ddtree.attention.backends import flashinfer_prefix

    patch.setattr(flashinfer_prefix, "BatchPrefillWithPagedKVCacheWrapper", Wrapper)
    Wrapper.plans_made = 0
