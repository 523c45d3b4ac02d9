# SPDX-License-Identifier: Apache-2.0
"""Tree attention on the CPU platform, in plain PyTorch: for tests and the demo.

vLLM's C++ attention takes no mask and keeps keys transposed inside a block, so the target's layers
keep their cache in a layout of their own ([num_blocks, Hkv, block_size, K | V]) and are read by the
reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_ddtree.attention.kernels.reference import tree_attention_reference
from vllm_ddtree.attention.layer import Variant, scales_of
from vllm_ddtree.integration.attention import host_cache_scales

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """The reference in place of the C++ kernels: one pass for every row, in trees or outside."""

    vllm_impl = CPUAttentionBackendImpl
    tree_variant = Variant()  # the layer's own takes its place

    def do_kv_cache_update(
        self,
        layer: Attention,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's keys and values; rows with a negative KV slot are dropped.

        Args:
            layer: the implementation's layer.
            key: [T, Hkv, Dh].
            value: as key.
            kv_cache: [num_blocks, Hkv, block_size, K | V], written.
            slot_mapping: int64 [T], KV slot of each row.

        """
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
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `CPUAttentionBackendImpl.forward` (v1/attention/backends/cpu_attn.py).

        Args:
            layer: the implementation's layer.
            query: [T, Hq, Dh].
            key: [T, Hkv, Dh]; the cache holds them already.
            value: as key.
            kv_cache: [num_blocks, Hkv, block_size, K | V].
            attn_metadata: the backend's, with `tree`; None: vLLM profiles its memory.
            output: [T, Hq, Dh], written.
            output_scale: not used.
            output_block_scale: not used.

        Returns:
            The output.

        """
        if attn_metadata is None:
            return output
        tree = attn_metadata.tree
        n = attn_metadata.num_actual_tokens
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        scale, value_scale = self.scale, 1.0
        if scales_of(self, layer, query.dtype) is not None:
            fp8 = current_platform.fp8_dtype()
            key_cache, value_cache = key_cache.view(fp8), value_cache.view(fp8)
            key_scale, value_scale = host_cache_scales(layer)
            scale = scale * key_scale
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
