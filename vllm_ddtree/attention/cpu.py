# SPDX-License-Identifier: Apache-2.0
"""Tree attention on the CPU platform, in plain PyTorch: for tests and the demo.

vLLM's C++ attention takes no mask and keeps keys transposed inside a block, so the target's layers
keep their cache in a layout of their own ([num_blocks, Hkv, block_size, K | V]) and are read by the
reference.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_ddtree.attention.reference import tree_attention_reference
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
        rows = torch.cat([key[:n], value[:n]], dim=-1)[there].to(kv_cache.dtype)
        kv_cache[slots // block_size, :, slots % block_size] = rows

    def forward(
        self,
        layer: torch.nn.Module,
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
            self.scale,
            self.tree_variant.window,
            self.tree_variant.soft_cap,
            self.sinks,
        )
        return output
