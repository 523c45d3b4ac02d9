# SPDX-License-Identifier: Apache-2.0
"""Tree attention on the CPU platform, in plain PyTorch: for tests and the demo.

vLLM's C++ attention takes no mask and keeps keys transposed inside a block, so the target's layers
keep their cache in a layout of their own ([num_blocks, Hkv, block_size, K | V]) and are read by the
reference.
"""

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_ddtree.attention.kernels.reference import tree_attention_reference
from vllm_ddtree.attention.scales import scales_of
from vllm_ddtree.attention.variant import Variant

FORM = "PyTorch reference"


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """The reference in place of the C++ kernels, for every row."""

    tree_variant = Variant()  # the layer's own takes its place

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,  # [T, Hkv, Dh]
        value: torch.Tensor,  # [T, Hkv, Dh]
        kv_cache: torch.Tensor,  # [num_blocks, Hkv, block_size, 2 * Dh]
        slot_mapping: torch.Tensor,  # [T] int64
    ) -> None:
        """Write this step's keys and values; rows with a negative slot are dropped."""
        n = min(slot_mapping.shape[0], key.shape[0])
        slots = slot_mapping[:n]
        there = slots >= 0
        slots = slots[there]
        block_size = kv_cache.shape[2]
        scales = scales_of(self, layer, key.dtype)
        if scales is not None:
            key, value = _to_fp8(key, scales.key), _to_fp8(value, scales.value)
        rows = torch.cat([key[:n], value[:n]], dim=-1)[there]
        kv_cache[slots // block_size, :, slots % block_size] = rows

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,  # [T, Hq, Dh]
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,  # [num_blocks, Hkv, block_size, 2 * Dh]
        attn_metadata: Any,
        output: torch.Tensor,  # [T, Hq, Dh]
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `CPUAttentionBackendImpl.forward` (v1/attention/backends/cpu_attn.py)."""
        if attn_metadata is None:
            return output
        tree = attn_metadata.tree
        n = attn_metadata.num_actual_tokens
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        scale, value_scale = self.scale, 1.0
        if scales_of(self, layer, query.dtype) is not None:
            fp8 = current_platform.fp8_dtype()
            key_cache, value_cache = key_cache.view(fp8), value_cache.view(fp8)
            scale, value_scale = scale * layer._k_scale_float, layer._v_scale_float
        none = torch.zeros_like(attn_metadata.seq_lens)
        output[:n] = tree_attention_reference(
            query[:n],
            key_cache,
            value_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            none if tree is None else tree.tail_lens,
            query.new_zeros(n, 1, dtype=torch.int32) if tree is None else tree.masks[:n],
            scale,
            self.tree_variant.window,
            self.tree_variant.soft_cap,
            self.sinks,
        )
        output[:n] *= value_scale
        return output


def _to_fp8(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The bytes of rows [T, Hkv, Dh] in vLLM's fp8, saturated as its kernels do it."""
    fp8 = current_platform.fp8_dtype()
    largest = torch.finfo(fp8).max
    return (rows / scales[:, None]).clamp(-largest, largest).to(fp8).view(torch.uint8)
