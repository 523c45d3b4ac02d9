# SPDX-License-Identifier: Apache-2.0
"""Move the committed states of recurrent layers on along the accepted paths.

The commit replays the rows of the path from the committed state, row by row, in float32: the same
operations as in plain decoding, so that the state after any number of rounds is the one that plain
decoding has. What it needs is small: the rows' projections before the convolution (which the
convolution's own state needs anyway), decays and betas. Keys and values follow from them again;
updates (u of `reference.py`) need not be kept, nor be accurate enough to live on in a state.

It runs after the walk, in two launches for all layers. The alternative is to replay at the
beginning of the next round's verify kernel, which has the state at hand. That saves one of the
three times that a round moves a state (verify reads it, the commit reads and writes it). But then
the cache holds stale states between two rounds, and whoever looks at it there would have to replay
first: prefix caching, which copies states at block boundaries, prefill chunks and plain decoding of
the same request, swapping out, sleep. Here the cache is at every step what vLLM takes it to be.

The replay also passes by every state on the way. Prefix caching asks for one of them: the state at
a block boundary that the path leads over (`BlockMoves`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.recurrent.inputs import rounded_product
from vllm_ddtree.recurrent.layer import StateLayer
from vllm_ddtree.recurrent.rows import RecurrentRows
from vllm_ddtree.recurrent.stash import Stash


@dataclass(frozen=True)
class BlockMoves:
    """Where states go if blocks are cached at multiples of their size (vLLM's mode "align").

    A path can lead over such a boundary. The state there is one that no round ends with, and the
    replay passes by it.
    """

    blocks: torch.Tensor
    """int32 [groups, at least R], block that receives the states behind the path, by group."""
    boundary_steps: torch.Tensor
    """int32 [at least R], rows of the path up to the boundary; 0: the path leads over none."""
    boundary_blocks: torch.Tensor
    """int32 [groups, at least R], block that receives the states at the boundary."""


class StateCommit:
    """Commits all recurrent layers of a target.

    Args:
        layers: all of one shape, strides and dtype, in the stash's order. The commit keeps their
            tensors alive.
        stash: what the layers stashed.
        groups: for each layer, the row of the commit's state indices that is its KV group's.

    Raises:
        ValueError: no layers, layers that differ, or a stash of another shape.

    """

    def __init__(self, layers: Sequence[StateLayer], stash: Stash, groups: Sequence[int]) -> None:
        if len({_layout(layer) for layer in layers}) != 1:
            raise ValueError("the layers of a commit must agree in shapes, strides and dtypes")
        first = layers[0]
        if stash.inputs.shape[::2] != (len(layers), first.num_channels):
            raise ValueError(f"a stash of {tuple(stash.inputs.shape)} for {len(layers)} layers")
        self.layers = list(layers)
        self.stash = stash
        device = first.states.device

        def pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
            addresses = [tensor.data_ptr() for tensor in tensors]
            return torch.tensor(addresses, dtype=torch.int64, device=device)

        self._states = pointers([layer.states for layer in layers])
        self._conv_states = pointers([layer.conv_states for layer in layers])
        self._weights = pointers([layer.conv_weight for layer in layers])
        biases = [layer.conv_bias for layer in layers if layer.conv_bias is not None]
        self._biases = pointers(biases) if biases else None
        self._groups = torch.tensor(list(groups), dtype=torch.int32, device=device)
        # A pointer out of a table is of unknown alignment to the compiler.
        self._alignment = 16 if all(t.states.data_ptr() % 16 == 0 for t in layers) else 1

    def commit(
        self,
        rows: RecurrentRows,
        state_indices: torch.Tensor,
        tail_lens: torch.Tensor,
        path_rows: torch.Tensor,
        path_lens: torch.Tensor,
        num_reqs: int,
        moves: BlockMoves | None = None,
    ) -> None:
        """Move the states of every request with a tree behind the last row of its path.

        What the paths' rows stashed is used up.

        Args:
            rows: `starts` of the step that was verified.
            state_indices: int32 [groups, at least num_reqs], block of each request's states in
                each group; a request with the null block (0) is skipped.
            tail_lens: int32 [at least num_reqs], tree rows of each request, 0 without a tree: such
                a request is skipped.
            path_rows: int32 [at least num_reqs, P], ascending tree rows, the root first.
            path_lens: int32 [at least num_reqs], rows of the path, the root included; at most P.
            num_reqs: requests of the step.
            moves: other blocks to write to; if not given, states stay in their blocks.

        """
        if num_reqs == 0:
            return
        first, inputs, gates = self.layers[0], self.stash.inputs, self.stash.gates
        num_layers = len(self.layers)
        moved = moves.blocks if moves else state_indices
        of_step = (
            rows.starts,
            state_indices,
            moved,
            moves.boundary_steps if moves else None,
            moves.boundary_blocks if moves else None,
            tail_lens,
            path_rows,
            path_lens,
        )
        strides = (
            *inputs.stride()[:2],
            state_indices.stride(0),
            moved.stride(0),
            moves.boundary_blocks.stride(0) if moves else 0,
            path_rows.stride(0),
        )
        block_p = triton.next_power_of_2(path_rows.shape[1])
        block_c = min(triton.next_power_of_2(first.num_channels), max(32, 2048 // block_p))
        _commit_inputs_kernel[(triton.cdiv(first.num_channels, block_c), num_layers, num_reqs)](
            self._conv_states,
            self._weights,
            self._biases,
            self._groups,
            inputs,
            *of_step,
            *strides,
            *first.conv_states.stride(),
            first.conv_weight.stride(0),
            NUM_CHANNELS=first.num_channels,
            WIDTH=first.width,
            WEIGHT=_triton_dtype(first.conv_weight),
            BIAS=self._biases is not None,
            SILU=first.silu,
            MOVES=moves is not None,
            BLOCK_P=block_p,
            BLOCK_C=block_c,
            BLOCK_W=triton.next_power_of_2(first.width - 1),
            num_warps=4,
        )
        block_v = min(32, triton.next_power_of_2(first.value_dim))
        blocks_v = triton.cdiv(first.value_dim, block_v)
        _replay_kernel[(blocks_v * first.num_heads, num_layers, num_reqs)](
            self._states,
            self._groups,
            inputs,
            gates,
            *of_step,
            *strides,
            *gates.stride()[:2],
            *_places_of_gates(first, gates),
            *first.states.stride()[:3],
            STATE=_triton_dtype(first.states),
            ALIGNMENT=self._alignment,
            MOVES=moves is not None,
            CORRECTS=first.corrects,
            BY_CHANNEL=first.by_channel,
            GROUP=first.num_heads // first.num_key_heads,
            KEY_START=first.key_start,
            VALUE_START=first.value_start,
            KEY_DIM=first.key_dim,
            VALUE_DIM=first.value_dim,
            BLOCKS_V=blocks_v,
            BLOCK_V=block_v,
            BLOCK_K=triton.next_power_of_2(first.key_dim),
            num_warps=4,
        )


def _layout(layer: StateLayer) -> tuple[object, ...]:
    tensors = (layer.conv_states, layer.states, layer.conv_weight, layer.conv_bias)
    layouts = (t is not None and (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    return (type(layer), *layouts, layer.num_key_heads, layer.silu)


def _places_of_gates(layer: StateLayer, gates: torch.Tensor) -> tuple[int, int]:
    """From one head's decay (its first) to the next head's, and to its beta."""
    if layer.by_channel:
        return gates.stride(2), layer.key_dim
    return gates.stride(3), gates.stride(2)


def _triton_dtype(tensor: torch.Tensor) -> tl.dtype:
    return getattr(tl, str(tensor.dtype).removeprefix("torch."))


@triton.jit
def _commit_inputs_kernel(
    conv_states_ptr,  # [L] of [N, NUM_CHANNELS, WIDTH - 1 or more]
    weights_ptr,  # [L] of [NUM_CHANNELS, WIDTH]
    biases_ptr,  # [L] of [NUM_CHANNELS] if BIAS
    groups_ptr,  # [L]
    inputs_ptr,  # [L, max_tree_rows, NUM_CHANNELS]
    starts_ptr,  # [R]
    state_indices_ptr,  # [groups, R]
    moved_ptr,  # [groups, R]
    boundary_steps_ptr,  # [R] if MOVES
    boundary_blocks_ptr,  # [groups, R] if MOVES
    tail_lens_ptr,  # [R]
    path_rows_ptr,  # [R, P]
    path_lens_ptr,  # [R]
    inputs_stride_l,
    inputs_stride_t,
    index_stride,
    moved_stride,
    boundary_stride,
    path_stride,
    conv_stride_n,
    conv_stride_c,
    conv_stride_t,
    weight_stride,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Puts the convolution's outputs in the place of the path's stashed inputs, and moves the
    committed inputs on."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    layer = tl.program_id(1).to(tl.int64)
    req = tl.program_id(2)
    path_len = tl.minimum(tl.load(path_lens_ptr + req), tl.load(tail_lens_ptr + req))
    group = tl.load(groups_ptr + layer)
    state_index = tl.load(state_indices_ptr + group * index_stride + req).to(tl.int64)
    if (path_len <= 0) | (state_index <= 0):
        return

    there = channel < NUM_CHANNELS
    inputs_ptr += layer * inputs_stride_l
    inputs_ptr += tl.load(starts_ptr + req).to(tl.int64) * inputs_stride_t
    path_rows_ptr += req * path_stride
    INPUT: tl.constexpr = inputs_ptr.dtype.element_ty
    all_states = tl.cast(tl.load(conv_states_ptr + layer), tl.pointer_type(INPUT))
    conv_states = all_states + state_index * conv_stride_n
    weights = tl.cast(tl.load(weights_ptr + layer), tl.pointer_type(WEIGHT))

    step = tl.arange(0, BLOCK_P)
    in_path = step < path_len
    acc = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    if BIAS:
        biases = tl.cast(tl.load(biases_ptr + layer), tl.pointer_type(WEIGHT))
        acc += tl.load(biases + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    for age in tl.static_range(WIDTH):
        x = _along_path(
            step - (WIDTH - 1) + age,
            in_path,
            inputs_ptr,
            inputs_stride_t,
            conv_states,
            conv_stride_t,
            conv_stride_c,
            path_rows_ptr,
            channel,
            there,
            WIDTH,
        )
        weight = tl.load(weights + channel * weight_stride + age, mask=there, other=0.0)
        acc += rounded_product(x, weight[None, :])
    if SILU:
        acc = acc / (1 + tl.exp(-acc))
    age = tl.arange(0, BLOCK_W)
    history = _along_path(
        path_len - (WIDTH - 1) + age,
        age < WIDTH - 1,
        inputs_ptr,
        inputs_stride_t,
        conv_states,
        conv_stride_t,
        conv_stride_c,
        path_rows_ptr,
        channel,
        there,
        WIDTH,
    )
    at_boundary = history
    boundary = 0
    if MOVES:
        boundary = tl.load(boundary_steps_ptr + req)
        at_boundary = _along_path(
            boundary - (WIDTH - 1) + age,
            age < WIDTH - 1,
            inputs_ptr,
            inputs_stride_t,
            conv_states,
            conv_stride_t,
            conv_stride_c,
            path_rows_ptr,
            channel,
            there,
            WIDTH,
        )
    # All is read before anything is overwritten.
    tl.debug_barrier()
    row = tl.load(path_rows_ptr + step, mask=in_path, other=0)
    tl.store(
        inputs_ptr + row[:, None] * inputs_stride_t + channel[None, :],
        acc.to(INPUT),
        mask=in_path[:, None] & there[None, :],
    )
    places = age[:, None] * conv_stride_t + channel[None, :] * conv_stride_c
    kept = (age < WIDTH - 1)[:, None] & there[None, :]
    if MOVES:  # noqa: SIM102  decided when compiled
        if boundary > 0:
            block = tl.load(boundary_blocks_ptr + group * boundary_stride + req).to(tl.int64)
            tl.store(all_states + block * conv_stride_n + places, at_boundary, mask=kept)
    block = tl.load(moved_ptr + group * moved_stride + req).to(tl.int64)
    tl.store(all_states + block * conv_stride_n + places, history, mask=kept)


@triton.jit
def _along_path(
    at,
    in_rows,
    inputs_ptr,
    inputs_stride_t,
    conv_states_ptr,
    conv_stride_t,
    conv_stride_c,
    path_rows_ptr,
    channel,
    there,
    WIDTH: tl.constexpr,
):
    """Inputs of steps `at` of a path; steps below 0 are committed, -1 the newest."""
    drafted = in_rows & (at >= 0)
    row = tl.load(path_rows_ptr + at, mask=drafted, other=0)
    x = tl.load(
        inputs_ptr + row[:, None] * inputs_stride_t + channel[None, :],
        mask=drafted[:, None] & there[None, :],
        other=0.0,
    )
    committed = tl.load(
        conv_states_ptr
        + (WIDTH - 1 + at)[:, None] * conv_stride_t
        + channel[None, :] * conv_stride_c,
        mask=(in_rows & (at < 0))[:, None] & there[None, :],
        other=0.0,
    )
    return tl.where(drafted[:, None], x, committed)


@triton.jit
def _replay_kernel(
    states_ptr,  # [L] of [N, Hv, VALUE_DIM, KEY_DIM]
    groups_ptr,  # [L]
    inputs_ptr,  # [L, max_tree_rows, C], convolved
    gates_ptr,  # [L, max_tree_rows, 3, Hv], or [L, max_tree_rows, Hv, KEY_DIM + 1] if BY_CHANNEL
    starts_ptr,  # [R]
    state_indices_ptr,  # [groups, R]
    moved_ptr,  # [groups, R]
    boundary_steps_ptr,  # [R] if MOVES
    boundary_blocks_ptr,  # [groups, R] if MOVES
    tail_lens_ptr,  # [R]
    path_rows_ptr,  # [R, P]
    path_lens_ptr,  # [R]
    inputs_stride_l,
    inputs_stride_t,
    index_stride,
    moved_stride,
    boundary_stride,
    path_stride,
    gates_stride_l,
    gates_stride_t,
    gates_stride_h,
    beta_offset,
    state_stride_n,
    state_stride_h,
    state_stride_v,
    STATE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MOVES: tl.constexpr,
    CORRECTS: tl.constexpr,  # whether an update is what the state lacks of a value
    BY_CHANNEL: tl.constexpr,  # whether each key channel has a decay
    GROUP: tl.constexpr,
    KEY_START: tl.constexpr,
    VALUE_START: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCKS_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head = tl.program_id(0) // BLOCKS_V
    column = tl.program_id(0) % BLOCKS_V * BLOCK_V + tl.arange(0, BLOCK_V)
    layer = tl.program_id(1).to(tl.int64)
    req = tl.program_id(2)
    path_len = tl.minimum(tl.load(path_lens_ptr + req), tl.load(tail_lens_ptr + req))
    group = tl.load(groups_ptr + layer)
    state_index = tl.load(state_indices_ptr + group * index_stride + req).to(tl.int64)
    if (path_len <= 0) | (state_index <= 0):
        return

    start = tl.load(starts_ptr + req).to(tl.int64)
    inputs_ptr += layer * inputs_stride_l + start * inputs_stride_t
    gates_ptr += layer * gates_stride_l + start * gates_stride_t + head * gates_stride_h
    path_rows_ptr += req * path_stride
    dim = tl.arange(0, BLOCK_K)
    in_dim = dim < KEY_DIM
    in_columns = column < VALUE_DIM
    key_ptr = inputs_ptr + KEY_START + head // GROUP * KEY_DIM + dim
    value_ptr = inputs_ptr + VALUE_START + head * VALUE_DIM + column

    states = tl.cast(tl.load(states_ptr + layer), tl.pointer_type(STATE))
    states = tl.multiple_of(states, ALIGNMENT)
    states += head * state_stride_h
    places = column[:, None] * state_stride_v + dim[None, :]
    in_state = in_columns[:, None] & in_dim[None, :]
    state = tl.load(states + state_index * state_stride_n + places, mask=in_state, other=0.0)
    state = state.to(tl.float32)
    boundary = 0
    if MOVES:
        boundary = tl.load(boundary_steps_ptr + req)
    for step in range(0, path_len):
        row = tl.load(path_rows_ptr + step)
        k = tl.load(key_ptr + row * inputs_stride_t, mask=in_dim, other=0.0).to(tl.float32)
        v = tl.load(value_ptr + row * inputs_stride_t, mask=in_columns, other=0.0)
        beta = tl.load(gates_ptr + row * gates_stride_t + beta_offset)
        if BY_CHANNEL:
            g = tl.load(gates_ptr + row * gates_stride_t + dim, mask=in_dim, other=0.0)
            state *= tl.exp(g)[None, :]
        else:
            state *= tl.exp(tl.load(gates_ptr + row * gates_stride_t))
        u = v.to(tl.float32)
        if CORRECTS:
            k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            u -= tl.sum(state * k[None, :], 1)
        state += (beta * u)[:, None] * k[None, :]
        if MOVES:  # noqa: SIM102  decided when compiled
            if step + 1 == boundary:
                block = tl.load(boundary_blocks_ptr + group * boundary_stride + req).to(tl.int64)
                tl.store(states + block * state_stride_n + places, state.to(STATE), mask=in_state)
    block = tl.load(moved_ptr + group * moved_stride + req).to(tl.int64)
    tl.store(states + block * state_stride_n + places, state.to(STATE), mask=in_state)
