# SPDX-License-Identifier: Apache-2.0
"""The core of a gated-delta-net layer in steps with trees: convolution, gates and recurrence.

vLLM's own core (model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py, `_forward_core`) takes
the rows outside trees. Projections, the gated norm and the output stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from vllm_ddtree.recurrent.inputs import tree_inputs
from vllm_ddtree.recurrent.layer import RecurrentLayer
from vllm_ddtree.recurrent.metadata import plain_rows_alone, tree_metadata
from vllm_ddtree.recurrent.verify import tree_delta_rule

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

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
        metadata = tree_metadata(name)
        if metadata is None:
            own(mixed_qkv, b, a, core_attn_out)
            return
        assert metadata.tree is not None
        if metadata.plain is not None:
            # First: rows before a tree move the states on from which it is verified.
            rows = metadata.plain_rows
            assert rows is not None
            out = core_attn_out.new_zeros(len(rows), *core_attn_out.shape[1:])
            with plain_rows_alone(name, metadata):
                own(mixed_qkv[rows], b[rows], a[rows], out)
            core_attn_out.index_copy_(0, rows, out)
        layer, stash, updates = target.of_layer(name)
        assert isinstance(layer, RecurrentLayer)
        convolved = mixed_qkv.new_empty(mixed_qkv.shape)
        tree_inputs(layer, metadata.tree, mixed_qkv, a, b, convolved, stash)
        tree_delta_rule(layer, metadata.tree, convolved, stash.gates, core_attn_out, updates)

    return core


def delta_view(layer: QwenGatedDeltaNetAttention) -> RecurrentLayer:
    """A layer's tensors, whose caches are bound."""
    conv_states, states = layer.kv_cache
    return RecurrentLayer(
        conv_states=conv_states if is_conv_state_dim_first() else conv_states.transpose(-1, -2),
        states=states,
        conv_weight=layer.conv1d.weight.flatten(1),
        conv_bias=layer.conv1d.bias,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        num_key_heads=layer.num_k_heads // layer.tp_size,
        silu=layer.activation in ("silu", "swish"),
    )
