# SPDX-License-Identifier: Apache-2.0
"""The tensors of one gated-delta-net layer, as vLLM's layer has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RecurrentLayer:
    """Weights and caches of one layer. The convolution's channels are queries, keys and values.

    Raises:
        ValueError: shapes do not fit each other, or an innermost stride is not 1.

    """

    conv_states: torch.Tensor
    """[N, C, at least W - 1], any strides: committed inputs, the first W - 1 count, oldest first.
    Block 0 is vLLM's null block: requests with it are skipped."""
    states: torch.Tensor
    """[N, Hv, V, K], any float dtype: the recurrent state by block."""
    conv_weight: torch.Tensor
    """[C, W], oldest tap first."""
    conv_bias: torch.Tensor | None
    """[C], or None."""
    A_log: torch.Tensor
    """[Hv]."""
    dt_bias: torch.Tensor
    """[Hv]."""
    num_key_heads: int
    """Hk; value head h reads key head h // (Hv / Hk)."""
    silu: bool = True
    """Whether SiLU follows the convolution."""

    def __post_init__(self) -> None:
        channels = 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim
        if self.num_channels != channels or self.conv_states.shape[1] != channels:
            raise ValueError(
                f"queries, keys and values have {channels} channels, the convolution has "
                f"{self.num_channels} and its states {self.conv_states.shape[1]}"
            )
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"{self.num_key_heads} key heads do not divide {self.num_heads} value heads"
            )
        if self.width < 2 or self.conv_states.shape[2] < self.width - 1:
            raise ValueError(
                f"a convolution of {self.width} taps, and states of {self.conv_states.shape[2]} "
                "inputs"
            )
        if self.states.stride(3) != 1 or self.conv_weight.stride(1) != 1:
            raise ValueError("states and convolution weights must be contiguous innermost")

    @property
    def num_heads(self) -> int:
        """Hv."""
        return self.states.shape[1]

    @property
    def value_dim(self) -> int:
        """V, of one head."""
        return self.states.shape[2]

    @property
    def key_dim(self) -> int:
        """K, of one head."""
        return self.states.shape[3]

    @property
    def num_channels(self) -> int:
        """C."""
        return self.conv_weight.shape[0]

    @property
    def width(self) -> int:
        """W, taps of the convolution."""
        return self.conv_weight.shape[1]
