# SPDX-License-Identifier: Apache-2.0
"""Prefix + tail: how a backend's implementation attends to a batch with trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from vllm_ddtree.attention.kernels.tail import tail_attention
from vllm_ddtree.attention.layer import scales_of

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.attention import Attention


def tree_forward(
    self: Any,
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
    output_scale: torch.Tensor | None = None,
    output_block_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`AttentionImpl.forward` (v1/attention/backend.py) over a batch with trees.

    The implementation is a subclass of the backend's by single inheritance, so that a layer's own
    object can become one. It has:

    - `vllm_impl`, the backend's class, and `plain_forward`, that class's forward, which serves rows
      outside trees.
    - `tree_variant`, the layer's `Variant`. Both passes read it. The implementation's `sinks` join
      in the tail.
    - `prefix_pass(query, key_cache, value_cache, attn_metadata, tree, output, scales)`, the
      attention of the tree rows to the keys before their tree. Its caches are
      [num_blocks, block_size, Hkv, Dh] of any strides. It may write to the output if all rows are
      in trees. It returns output and log-sum-exp as `tail_attention` takes them, of scores with the
      layer's window and soft-cap, without its sinks.

    The tail reads a quantised cache, too: as in plain decoding, a row sees the rounded keys and
    values of its ancestors.

    Args:
        self: the implementation.
        layer: its layer.
        query: [T, Hq, Dh], fp8 where the layer has quantised it.
        key: [T, Hkv, Dh]; None: the cache holds them already.
        value: as key.
        kv_cache: [num_blocks, Hkv, block_size, K | V].
        attn_metadata: the backend's, with `tree`.
        output: [T, Hq, Dh], written.
        output_scale: for the backend's own forward.
        output_block_scale: for the backend's own forward.

    Returns:
        The output.

    """
    tree = getattr(attn_metadata, "tree", None)
    if tree is None or tree.has_plain_rows:
        self.plain_forward(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )
    if tree is None:
        return output
    n = attn_metadata.num_actual_tokens
    query, out = query[:n], output[:n]
    # (B, H, N, 2*D) -> ((B, N, H, D), (B, N, H, D))
    key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
    scales = scales_of(self, layer, out.dtype)
    if scales is not None:
        # vLLM keeps them as bytes.
        key_cache = key_cache.view(current_platform.fp8_dtype())
        value_cache = value_cache.view(current_platform.fp8_dtype())
    prefix_out, prefix_lse = self.prefix_pass(
        query, key_cache, value_cache, attn_metadata, tree, out, scales
    )
    fresh = scales is None and key is not None and value is not None
    tail_attention(
        query,
        key[:n] if fresh else key_cache,  # type: ignore[index]
        value[:n] if fresh else value_cache,  # type: ignore[index]
        tree.masks[:n],
        attn_metadata.query_start_loc,
        tree.tail_lens,
        prefix_out,
        prefix_lse,
        out,
        self.scale,
        tree.max_tail,
        slot_mapping=None if fresh else attn_metadata.slot_mapping,
        small_tiles=not tree.in_graph,
        positions=tree.positions,
        window=self.tree_variant.tail_window,
        soft_cap=self.tree_variant.soft_cap,
        sinks=self.sinks,
        scales=scales,
    )
    return output
