# SPDX-License-Identifier: Apache-2.0
"""`cases` for the other recurrences: Mamba2 and Kimi delta attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.recurrent import cases
from tests.recurrent.cases import NAN, Request, Sizes, Step
from vllm_ddtree.recurrent import reference, reference_kda, reference_mamba2
from vllm_ddtree.recurrent.convolution import tree_convolution
from vllm_ddtree.recurrent.kda import KDALayer, KDAStash, kda_gates
from vllm_ddtree.recurrent.kda_verify import KDAScratch, tree_kda
from vllm_ddtree.recurrent.layer import StateLayer
from vllm_ddtree.recurrent.mamba2 import Mamba2Layer, mamba2_gates, tree_mamba2


def shared_tensors(sizes: Sizes, num_blocks: int, seed: int, spare: int) -> dict[str, object]:
    """What layers of every kind have."""
    layer = cases.make_layer(sizes, num_blocks, seed, spare)
    return {
        field.name: getattr(layer, field.name)
        for field in dataclasses.fields(StateLayer)
        if field.init
    }


def make_mamba2(sizes: Sizes, num_blocks: int, seed: int, spare: int = 2) -> Mamba2Layer:
    shared = shared_tensors(sizes, num_blocks, seed, spare)
    return Mamba2Layer(
        **shared,  # type: ignore[arg-type]
        A=-torch.rand(sizes.heads).clamp(min=0.1) * sizes.decay,
        dt_bias=torch.randn(sizes.heads).to(sizes.dtype),
        D=torch.randn(sizes.heads).to(sizes.dtype),
    )


class Mamba2Step(Step):
    """`reference` takes the convolution's outputs as the kernel has rounded them."""

    make_layer = staticmethod(make_mamba2)

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.convolved: dict[int, torch.Tensor] = {}

    def convolve(self, layer: Mamba2Layer, index: int = 0) -> torch.Tensor:  # type: ignore[override]
        out = torch.full_like(self.inputs[index], NAN)
        stash = self.stash[index]
        tree_convolution(layer, self.tree_step, self.inputs[index], out, stash.inputs)
        mamba2_gates(layer, self.tree_step, self.a[index], stash.gates)
        self.convolved[index] = out
        return out

    def verify(  # type: ignore[override]
        self, layer: Mamba2Layer, qkv: torch.Tensor, index: int = 0, block_v: int | None = None
    ) -> torch.Tensor:
        s = self.sizes
        out = torch.full((len(qkv), s.heads, s.value_dim), NAN, dtype=s.dtype)
        tree_mamba2(layer, self.tree_step, qkv, self.stash[index].gates, out, block_v)
        return out

    def reference(  # type: ignore[override]
        self, layer: Mamba2Layer, req: int, index: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        s, rows = self.sizes, self.tree_rows(req)
        parents, block = list(self.requests[req].parents), self.blocks[req]
        inputs = self.inputs[index, rows].double()
        bias = None if layer.conv_bias is None else layer.conv_bias.double()
        history = layer.conv_states[block].T[: s.width - 1].double()
        xbc = reference.short_conv(inputs, layer.conv_weight.double(), bias, history, parents)
        # B and C are not normalised: large sums cancel, down to what rounding moves in these.
        taken = self.convolved[index][rows].double()
        x, b, c = reference_mamba2.mamba_inputs(taken, s.key_heads, s.heads, s.key_dim, s.value_dim)
        dt = reference_mamba2.time_steps(self.a[index, rows].double(), layer.dt_bias.double())
        A, D, state = layer.A.double(), layer.D.double(), layer.states[block].double()
        out, states = reference_mamba2.sequential(x, b, c, dt, A, D, parents, state)
        return xbc, out, states, inputs


def make_kda(
    sizes: Sizes, num_blocks: int, seed: int, spare: int = 2, lower_bound: float | None = None
) -> KDALayer:
    shared = shared_tensors(sizes, num_blocks, seed, spare)
    return KDALayer(
        **shared,  # type: ignore[arg-type]
        A_log=torch.rand(sizes.heads).clamp(min=0.1).mul(sizes.decay).log(),
        dt_bias=torch.randn(sizes.heads, sizes.key_dim),
        lower_bound=lower_bound,
    )


def make_bounded_kda(sizes: Sizes, num_blocks: int, seed: int, spare: int = 2) -> KDALayer:
    return make_kda(sizes, num_blocks, seed, spare, lower_bound=-5.0)


class KDAStep(Step):
    make_layer: Callable[..., Any] = staticmethod(make_kda)

    def __init__(
        self,
        sizes: Sizes,
        requests: Sequence[Request],
        seed: int = 0,
        padded: int = 0,
        budget: int = 63,
        layers: int = 1,
    ) -> None:
        super().__init__(sizes, requests, seed, padded, budget, layers)
        s, device = sizes, self.masks.device
        most = self.rows.max_tree_rows
        self.stash = KDAStash(layers, most, s.channels, s.heads, s.key_dim, s.dtype, device)
        self.scratch = KDAScratch(most, budget + 1, s.heads, s.key_dim, s.value_dim, device)
        for tensor in (self.scratch.totals, self.scratch.scores, self.stash.gates):
            tensor.fill_(NAN)
        # Decays by channel, from projections of a wide range.
        self.a = 3 * torch.randn(layers, len(self.masks), s.heads * s.key_dim)
        self.a = self.a.to(s.dtype)
        self.a[:, ~self.in_tree] = NAN

    def convolve(self, layer: KDALayer, index: int = 0) -> torch.Tensor:  # type: ignore[override]
        out = torch.full_like(self.inputs[index], NAN)
        step, stash = self.tree_step, self.stash[index]
        tree_convolution(layer, step, self.inputs[index], out, stash.inputs)
        kda_gates(layer, step, self.a[index], self.b[index], stash.gates, self.scratch.totals)
        return out

    def verify(  # type: ignore[override]
        self, layer: KDALayer, qkv: torch.Tensor, index: int = 0, block_v: int | None = None
    ) -> torch.Tensor:
        s = self.sizes
        out = torch.full((len(qkv), s.heads, s.value_dim), NAN, dtype=s.dtype)
        gates = self.stash[index].gates
        tree_kda(layer, self.tree_step, qkv, gates, out, self.scratch, block_v)
        return out

    def reference(  # type: ignore[override]
        self, layer: KDALayer, req: int, index: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        s, rows = self.sizes, self.tree_rows(req)
        parents, block = list(self.requests[req].parents), self.blocks[req]
        inputs = self.inputs[index, rows].double()
        bias = None if layer.conv_bias is None else layer.conv_bias.double()
        history = layer.conv_states[block].T[: s.width - 1].double()
        qkv = reference.short_conv(inputs, layer.conv_weight.double(), bias, history, parents)
        q, k, v = reference.delta_inputs(qkv, s.heads, s.heads, s.key_dim, s.value_dim)
        raw = self.a[index, rows].double().unflatten(-1, (s.heads, s.key_dim))
        A_log, dt_bias = layer.A_log.double(), layer.dt_bias.double()
        g = reference_kda.log_decays(raw, A_log, dt_bias, layer.lower_bound)
        beta, state = self.b[index, rows].double().sigmoid(), layer.states[block].double()
        out, states = reference_kda.sequential(q, k, v, g, beta, parents, state)
        return qkv, out, states, inputs


class BoundedKDAStep(KDAStep):
    """Decays with a lower bound, as in Kimi-K3."""

    make_layer = staticmethod(make_bounded_kda)
