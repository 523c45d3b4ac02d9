# SPDX-License-Identifier: Apache-2.0
"""The tensors of one recurrent layer, as vLLM's layer has them.

All kinds of layers have a short convolution over queries, keys and values, and a state [V, K] a
head. They differ in what decays and what updates it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True, kw_only=True)
class StateLayer:
    """Weights and caches that layers of every kind have.

    The convolution's channels are queries, keys and values, in this order unless a kind says
    otherwise.

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
    num_key_heads: int
    """Hk; value head h reads key head h // (Hv / Hk)."""
    silu: bool = True
    """Whether SiLU follows the convolution."""
    corrects: ClassVar[bool] = True
    """Whether keys have length 1 and an update is what a value differs by from what the state says
    for its key (the delta rule)."""
    by_channel: ClassVar[bool] = False
    """Whether each key channel has a decay of its own."""

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

    @property
    def key_start(self) -> int:
        """First channel of the keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_start(self) -> int:
        """First channel of the values."""
        return 2 * self.num_key_heads * self.key_dim


@dataclass(frozen=True, kw_only=True)
class RecurrentLayer(StateLayer):
    """A gated-delta-net layer."""

    A_log: torch.Tensor
    """[Hv]."""
    dt_bias: torch.Tensor
    """[Hv]."""
