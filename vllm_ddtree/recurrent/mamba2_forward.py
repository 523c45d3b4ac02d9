# SPDX-License-Identifier: Apache-2.0
"""The core of a Mamba2 layer in steps with trees: convolution, time steps and recurrence.

vLLM's own core (model_executor/layers/mamba/mamba_mixer2.py, `conv_ssm_forward`) takes the rows
outside trees. Projections, the gated norm and the output stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from vllm_ddtree.recurrent.convolution import tree_convolution
from vllm_ddtree.recurrent.mamba2 import Mamba2Layer, mamba2_gates, tree_mamba2
from vllm_ddtree.recurrent.metadata import plain_rows_alone, tree_metadata

if TYPE_CHECKING:
    from vllm_ddtree.recurrent.target import RecurrentTarget

Core = Callable[[torch.Tensor, torch.Tensor], None]
"""(gate, x, B, C and time steps [T, ...], out [T, H * V])"""


def mamba2_core(name: str, mixer: MambaMixer2, own: Core, target: RecurrentTarget) -> Core:
    """The core of a layer, with trees.

    Args:
        name: the layer's.
        mixer: vLLM's layer.
        own: vLLM's core.
        target: the layers that it is one of.

    """
    widths = [mixer.tped_intermediate_size, mixer.tped_conv_size, mixer.tped_dt_size]

    def core(projected_states: torch.Tensor, output: torch.Tensor) -> None:
        metadata = tree_metadata(name)
        if metadata is None:
            own(projected_states, output)
            return
        assert metadata.tree is not None
        if metadata.plain is not None:
            # First: rows before a tree move the states on from which it is verified.
            rows = metadata.plain_rows
            assert rows is not None
            out = output.new_zeros(len(rows), *output.shape[1:])
            with plain_rows_alone(name, metadata):
                own(projected_states[rows], out)
            output.index_copy_(0, rows, out)
        layer, stash, _ = target.of_layer(name)
        assert isinstance(layer, Mamba2Layer)
        _, inputs, raw = projected_states.split(widths, dim=-1)
        convolved = inputs.new_empty(inputs.shape)
        tree_convolution(layer, metadata.tree, inputs, convolved, stash.inputs)
        mamba2_gates(layer, metadata.tree, raw, stash.gates)
        shape = (len(output), layer.num_heads, layer.value_dim)
        tree_mamba2(layer, metadata.tree, convolved, stash.gates, output.view(shape))

    return core


def mamba2_view(mixer: MambaMixer2) -> Mamba2Layer:
    """A layer's tensors, whose caches are bound."""
    conv_states, states = mixer.kv_cache
    return Mamba2Layer(
        conv_states=conv_states if is_conv_state_dim_first() else conv_states.transpose(-1, -2),
        states=states,
        conv_weight=mixer.conv_weights,
        conv_bias=mixer.conv1d.bias,
        A=mixer.A,
        dt_bias=mixer.dt_bias,
        D=mixer.D,
        num_key_heads=mixer.n_groups // mixer.tp_size,
        silu=mixer.activation in ("silu", "swish"),
    )
