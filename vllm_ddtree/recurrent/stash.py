# SPDX-License-Identifier: Apache-2.0
"""What recurrent layers keep of a step's tree rows until the accepted path is known."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerStash:
    """The rows of one layer. Rows go by their number (`RecurrentRows.starts`)."""

    inputs: torch.Tensor
    """[max_tree_rows, C], the convolution's inputs."""
    gates: torch.Tensor
    """float32 [max_tree_rows, 3, Hv], log decay, beta, and the sum of the log decays over the path
    from the root to the row."""


class Stash:
    """The stash of all layers, persistent. Its size follows the rows of a step, not the requests.

    At Qwen3.5-9B's sizes a row takes 17 KB a layer; a recurrent state, 2 MB.

    Args:
        num_layers: recurrent layers.
        max_tree_rows: most tree rows of a step.
        num_channels: channels of the convolution.
        num_heads: value heads.
        dtype: of the convolution's inputs.
        device: where it lies.

    """

    def __init__(
        self,
        num_layers: int,
        max_tree_rows: int,
        num_channels: int,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, max_tree_rows)
        self.inputs = torch.zeros(*shape, num_channels, dtype=dtype, device=device)
        """[layers, max_tree_rows, C]."""
        self.gates = torch.zeros(*shape, 3, num_heads, dtype=torch.float32, device=device)
        """float32 [layers, max_tree_rows, 3, Hv]."""

    def __getitem__(self, layer: int) -> LayerStash:
        return LayerStash(self.inputs[layer], self.gates[layer])
