# SPDX-License-Identifier: Apache-2.0
"""Random verify batches for recurrent layers, with everything the kernels read.

Tensors are made on torch's default device. What no kernel may read holds NaN: padding rows, states
of other requests, the rows before a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.attention.tree_cases import ancestor_sets, pack_masks, random_tree
from vllm_ddtree.recurrent import reference
from vllm_ddtree.recurrent.commit import BlockMoves, StateCommit
from vllm_ddtree.recurrent.inputs import tree_inputs
from vllm_ddtree.recurrent.layer import RecurrentLayer, StateLayer
from vllm_ddtree.recurrent.rows import BLOCK_ROWS, RecurrentRows, TreeStep, prepare_recurrent_rows
from vllm_ddtree.recurrent.stash import Stash
from vllm_ddtree.recurrent.verify import tree_delta_rule

NAN = float("nan")


@dataclass(frozen=True)
class Sizes:
    """A recurrent layer."""

    key_heads: int = 1
    heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    width: int = 4
    bias: bool = False
    dtype: torch.dtype = torch.float32
    """Of rows, weights and committed inputs."""
    state_dtype: torch.dtype = torch.float32
    decay: float = 1.0
    """Factor of exp(A_log): 0 never forgets, 30 forgets all at once."""

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


def make_layer(sizes: Sizes, num_blocks: int, seed: int, spare: int = 2) -> RecurrentLayer:
    """Random weights and caches; the caches have `spare` inputs more than the width needs."""
    s = sizes
    torch.manual_seed(seed)
    # vLLM keeps [block, token, channel], and kernels take it with channels before tokens.
    history = torch.randn(num_blocks, s.width - 1 + spare, s.channels)
    history[:, s.width - 1 :] = NAN
    states = torch.randn(num_blocks, s.heads, s.value_dim, s.key_dim)
    states[0] = NAN
    return RecurrentLayer(
        conv_states=history.to(s.dtype).transpose(1, 2),
        states=states.to(s.state_dtype),
        conv_weight=torch.randn(s.channels, s.width).to(s.dtype),
        conv_bias=torch.randn(s.channels).to(s.dtype) if s.bias else None,
        A_log=torch.rand(s.heads).clamp(min=0.1).mul(s.decay).log(),
        dt_bias=torch.randn(s.heads).to(s.dtype),
        num_key_heads=s.key_heads,
    )


@dataclass(frozen=True)
class Request:
    """`before` plain rows, then a tree of these parents (none: no tree)."""

    parents: Sequence[int] = ()
    before: int = 0

    @property
    def num_rows(self) -> int:
        return self.before + len(self.parents)


def chain(num_rows: int) -> list[int]:
    return list(range(-1, num_rows - 1))


def tree(seed: int, num_rows: int, max_depth: int = 15) -> list[int]:
    return random_tree(np.random.default_rng(seed), num_rows, max_depth).tolist()


class Step:
    """One step of a batch: rows of every request, and what the model gives a layer for them."""

    make_layer: Callable[..., Any] = staticmethod(make_layer)
    """The layer of this kind of recurrence."""

    def __init__(
        self,
        sizes: Sizes,
        requests: Sequence[Request],
        seed: int = 0,
        padded: int = 0,
        budget: int = 63,
        layers: int = 1,
    ) -> None:
        self.sizes, self.requests = sizes, requests
        self.num_reqs = len(requests)
        lens = [request.num_rows for request in requests]
        starts = np.cumsum([0, *lens, *[0] * padded])
        num_rows = int(starts[-1]) + 3  # padding rows
        tails = [len(request.parents) for request in requests] + [0] * padded
        rng = np.random.default_rng(seed)

        def ints(values: Any) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values), dtype=torch.int32)

        self.query_start_loc, self.tail_lens = ints(starts), ints(tails)
        self.max_tail, self.num_tree_rows = max(tails), sum(tails)
        masks = torch.full((num_rows, (budget + 32) // 32), -1, dtype=torch.int32)
        parents = np.full((self.num_reqs, budget + 1), -1)
        for req, request in enumerate(requests):
            if request.parents:
                tree_rows = np.asarray(request.parents)
                parents[req, : len(tree_rows)] = tree_rows
                bits = pack_masks(ancestor_sets(tree_rows), masks.shape[1])
                masks[self.root(req) : self.root(req) + len(tree_rows)] = bits
        trees_masks = torch.full((self.num_reqs, budget + 1, masks.shape[1]), -1, dtype=torch.int32)
        for req, request in enumerate(requests):
            trees_masks[req, : len(request.parents)] = masks[self.tree_rows(req)]
        self.masks = masks
        # The trees lie by the request's index, in any order.
        order = rng.permutation(self.num_reqs)
        self.idx_mapping = torch.as_tensor(order)
        back = np.argsort(order)
        self.trees: Any = SimpleNamespace(parents=ints(parents[back]), masks=trees_masks[back])
        # Blocks of the states, one a request and group; padded requests have the null block.
        self.num_blocks = 2 * self.num_reqs + 2
        self.blocks = rng.permutation(np.arange(1, self.num_blocks))[: self.num_reqs].tolist()
        self.state_indices = ints([*self.blocks, *[0] * padded])

        self.rows = RecurrentRows(
            max(1, self.num_tree_rows), self.num_reqs + padded, sizes.width, masks.device
        )
        self.stash = Stash(
            layers,
            self.rows.max_tree_rows,
            sizes.channels,
            sizes.heads,
            sizes.dtype,
            masks.device,
        )
        torch.manual_seed(seed)
        shape = (layers, num_rows)
        self.inputs = torch.randn(*shape, sizes.channels + 8).to(sizes.dtype)[..., :-8]
        self.a, self.b = (torch.randn(*shape, sizes.heads).to(sizes.dtype) for _ in "ab")
        in_tree = torch.zeros(num_rows, dtype=torch.bool)
        for req in range(self.num_reqs):
            in_tree[self.root(req) : self.root(req) + tails[req]] = True
        for tensor in (self.inputs, self.a, self.b):
            tensor[:, ~in_tree] = NAN
        self.in_tree = in_tree

    def root(self, req: int) -> int:
        """Row of a request's root."""
        return int(self.query_start_loc[req + 1]) - len(self.requests[req].parents)

    def tree_rows(self, req: int) -> slice:
        return slice(self.root(req), self.root(req) + len(self.requests[req].parents))

    def prepare(self) -> None:
        prepare_recurrent_rows(
            self.trees,
            self.rows,
            self.idx_mapping,
            self.tail_lens,
            self.num_reqs,
            self.num_tree_rows,
        )

    @property
    def tree_step(self) -> TreeStep:
        return TreeStep(
            self.rows,
            self.masks,
            self.query_start_loc,
            self.tail_lens,
            self.state_indices,
            self.max_tail,
            self.max_depth,
        )

    def convolve(self, layer: RecurrentLayer, index: int = 0) -> torch.Tensor:
        """The kernel's queries, keys and values; what it does not write is NaN."""
        out = torch.full_like(self.inputs[index], NAN)
        tree_inputs(
            layer,
            self.tree_step,
            self.inputs[index],
            self.a[index],
            self.b[index],
            out,
            self.stash[index],
        )
        return out

    def fill_stash(self, layer: RecurrentLayer, req: int, index: int = 0) -> None:
        """What `convolve` stashes of the only request, without a kernel."""
        rows, stash = self.tree_rows(req), self.stash[index]
        stash.inputs[:] = self.inputs[index, rows]
        a, b = self.a[index, rows].float(), self.b[index, rows].float()
        stash.gates[:, 0] = reference.log_decays(a, layer.A_log, layer.dt_bias.float())
        stash.gates[:, 1] = b.sigmoid()

    def verify(
        self, layer: RecurrentLayer, qkv: torch.Tensor, index: int = 0, block_v: int | None = None
    ) -> torch.Tensor:
        """The kernel's outputs; what it does not write is NaN."""
        s = self.sizes
        out = torch.full((len(qkv), s.heads, s.value_dim), NAN, dtype=s.dtype)
        updates = None
        if self.max_tail > BLOCK_ROWS:
            updates = torch.full((self.num_tree_rows, s.heads, s.value_dim), NAN)
        gates = self.stash[index].gates
        tree_delta_rule(layer, self.tree_step, qkv, gates, out, updates, block_v)
        return out

    @property
    def max_depth(self) -> int:
        return max(
            len(path) - 1
            for request in self.requests
            if request.parents
            for path in ancestor_sets(np.asarray(request.parents))
        )

    def commit(
        self,
        layers: Sequence[StateLayer],
        paths: Sequence[Sequence[int]],
        groups: Sequence[int] = (0,),
        blocks: torch.Tensor | None = None,
        moves: BlockMoves | None = None,
    ) -> None:
        """`paths`: rows of each request's path; empty without a tree. `blocks`: int32 [groups, R],
        by default one group's."""
        longest = max(len(path) for path in paths) + 1
        path_rows = torch.full((self.num_reqs, longest), 1 << 20, dtype=torch.int32)
        for req, path in enumerate(paths):
            path_rows[req, : len(path)] = torch.tensor(path)
        StateCommit(layers, self.stash, groups).commit(
            self.rows,
            self.state_indices[None] if blocks is None else blocks,
            self.tail_lens,
            path_rows,
            # A request without a tree has a path of one row from the walk.
            torch.tensor([max(1, len(path)) for path in paths], dtype=torch.int32),
            self.num_reqs,
            moves,
        )

    def reference(
        self, layer: RecurrentLayer, req: int, index: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Convolution outputs, outputs, states and inputs of one request's tree, in float64."""
        s, rows = self.sizes, self.tree_rows(req)
        parents, block = list(self.requests[req].parents), self.blocks[req]
        inputs = self.inputs[index, rows].double()
        bias = None if layer.conv_bias is None else layer.conv_bias.double()
        history = layer.conv_states[block].T[: s.width - 1].double()
        qkv = reference.short_conv(inputs, layer.conv_weight.double(), bias, history, parents)
        q, k, v = reference.delta_inputs(qkv, s.key_heads, s.heads, s.key_dim, s.value_dim)
        g = reference.log_decays(
            self.a[index, rows].double(), layer.A_log.double(), layer.dt_bias.double()
        )
        beta = self.b[index, rows].double().sigmoid()
        out, states = reference.sequential(q, k, v, g, beta, parents, layer.states[block].double())
        return qkv, out, states, inputs


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """Rows from the root to `row`."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]
