# SPDX-License-Identifier: Apache-2.0
"""The core of a gated-delta-net layer in steps with trees: convolution, gates and recurrence.

vLLM's own core (model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py, `_forward_core`) takes
the rows outside trees. Projections, the gated norm and the output stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from vllm.forward_context import get_forward_context

from vllm_ddtree.recurrent.inputs import tree_inputs
from vllm_ddtree.recurrent.metadata import TreeStateMetadata
from vllm_ddtree.recurrent.verify import tree_delta_rule

if TYPE_CHECKING:
    from vllm_ddtree.recurrent.target import RecurrentTarget

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(queries, keys and values [T, C], b [T, Hv], a [T, Hv], out [T, Hv, V])"""


def tree_core(name: str, own: Core, target: RecurrentTarget) -> Core:
    """The core of a layer, with trees.

    Args:
        name: the layer's.
        own: vLLM's core.
        target: the layers that it is one of.

    """

    def core(
        mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        all_metadata = get_forward_context().attn_metadata
        metadata = all_metadata.get(name) if isinstance(all_metadata, dict) else None
        if not isinstance(metadata, TreeStateMetadata):
            own(mixed_qkv, b, a, core_attn_out)
            return
        assert isinstance(all_metadata, dict) and metadata.tree is not None
        if metadata.plain is not None:
            # First: rows before a tree move the states on from which it is verified.
            rows = metadata.plain_rows
            assert rows is not None
            out = core_attn_out.new_zeros(len(rows), *core_attn_out.shape[1:])
            all_metadata[name] = metadata.plain
            try:
                own(mixed_qkv[rows], b[rows], a[rows], out)
            finally:
                all_metadata[name] = metadata
            core_attn_out.index_copy_(0, rows, out)
        layer, stash, updates = target.of_layer(name)
        convolved = mixed_qkv.new_empty(mixed_qkv.shape)
        tree_inputs(layer, metadata.tree, mixed_qkv, a, b, convolved, stash)
        tree_delta_rule(layer, metadata.tree, convolved, stash.gates, core_attn_out, updates)

    return core
