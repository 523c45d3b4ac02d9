# SPDX-License-Identifier: Apache-2.0
"""Move the committed states of recurrent layers on along the accepted paths.

The commit replays the rows of the path from the committed state, row by row, in float32: the same
operations as in plain decoding, so that the state after any number of rounds is the one that plain
decoding has. What it needs is small: the rows' projections before the convolution (which the
convolution's own state needs anyway), decays and betas. Keys and values follow from them again;
updates (u of `reference.py`) need not be kept, nor be accurate enough to live on in a state.

It runs after the walk, for all layers in one launch, and a second small launch moves the
convolutions' committed inputs. The alternative is to replay at the beginning of the next round's
verify kernel, which has the state at hand: that saves one read of the state in a round (of three
accesses: verify reads, commit reads and writes). But then the cache holds stale states between two
rounds, and whoever looks at it there would have to replay first: prefix caching, which copies
states at block boundaries, prefill chunks and plain decoding of the same request, swapping out,
sleep. Here the cache is at every step what vLLM takes it to be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.recurrent.inputs import rounded_product
from vllm_ddtree.recurrent.layer import RecurrentLayer
from vllm_ddtree.recurrent.rows import RecurrentRows
from vllm_ddtree.recurrent.stash import Stash


class StateCommit:
    """Commits all recurrent layers of a target, in two launches.

    Args:
        layers: all of one shape, strides and dtype, in the stash's order. The commit keeps their
            tensors alive.
        stash: what the layers stashed.
        groups: for each layer, the row of the commit's state indices that is its KV group's.

    Raises:
        ValueError: no layers, layers that differ, or a stash of another shape.

    """

    def __init__(
        self, layers: Sequence[RecurrentLayer], stash: Stash, groups: Sequence[int]
    ) -> None:
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

    def commit(
        self,
        rows: RecurrentRows,
        state_indices: torch.Tensor,
        tail_lens: torch.Tensor,
        path_rows: torch.Tensor,
        path_lens: torch.Tensor,
        num_reqs: int,
    ) -> None:
        """Move the states of every request with a tree behind the last row of its path.

        Args:
            rows: `starts` of the step that was verified.
            state_indices: int32 [groups, at least num_reqs], block of each request's states in
                each group; a request with the null block (0) is skipped.
            tail_lens: int32 [at least num_reqs], tree rows of each request, 0 without a tree: such
                a request is skipped.
            path_rows: int32 [at least num_reqs, P], ascending tree rows, the root first.
            path_lens: int32 [at least num_reqs], rows of the path, the root included.
            num_reqs: requests of the step.

        """
        if num_reqs == 0:
            return
        first, inputs, gates = self.layers[0], self.stash.inputs, self.stash.gates
        common = {
            "WIDTH": first.width,
            "INPUT": _triton_dtype(first.conv_states),
            "num_warps": 4,
        }
        block_v = min(32, max(16, triton.next_power_of_2(first.value_dim)))
        blocks_v = triton.cdiv(first.value_dim, block_v)
        _replay_kernel[(blocks_v * first.num_heads, len(self.layers), num_reqs)](
            self._states,
            self._conv_states,
            self._weights,
            self._biases,
            self._groups,
            inputs,
            gates,
            rows.starts,
            state_indices,
            tail_lens,
            path_rows,
            path_lens,
            *first.states.stride()[:3],
            *first.conv_states.stride(),
            first.conv_weight.stride(0),
            *inputs.stride()[:2],
            *gates.stride()[:3],
            state_indices.stride(0),
            path_rows.stride(0),
            STATE=_triton_dtype(first.states),
            WEIGHT=_triton_dtype(first.conv_weight),
            BIAS=self._biases is not None,
            SILU=first.silu,
            GROUP=first.num_heads // first.num_key_heads,
            KEY_HEADS=first.num_key_heads,
            KEY_DIM=first.key_dim,
            VALUE_DIM=first.value_dim,
            BLOCKS_V=blocks_v,
            BLOCK_V=block_v,
            BLOCK_K=triton.next_power_of_2(first.key_dim),
            **common,
        )
        block_c = min(512, triton.next_power_of_2(first.num_channels))
        grid = (triton.cdiv(first.num_channels, block_c), len(self.layers), num_reqs)
        _move_inputs_kernel[grid](
            self._conv_states,
            self._groups,
            inputs,
            rows.starts,
            state_indices,
            tail_lens,
            path_rows,
            path_lens,
            *first.conv_states.stride(),
            *inputs.stride()[:2],
            state_indices.stride(0),
            path_rows.stride(0),
            NUM_CHANNELS=first.num_channels,
            BLOCK_C=block_c,
            **common,
        )


def _layout(layer: RecurrentLayer) -> tuple[object, ...]:
    tensors = (layer.conv_states, layer.states, layer.conv_weight, layer.conv_bias)
    layouts = (t is not None and (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    return (*layouts, layer.num_key_heads, layer.silu)


def _triton_dtype(tensor: torch.Tensor) -> tl.dtype:
    return getattr(tl, str(tensor.dtype).removeprefix("torch."))


@triton.jit
def _replay_kernel(
    states_ptr,  # [L] of [N, Hv, VALUE_DIM, KEY_DIM]
    conv_states_ptr,  # [L] of [N, C, WIDTH - 1 or more]
    weights_ptr,  # [L] of [C, WIDTH]
    biases_ptr,  # [L] of [C] if BIAS
    groups_ptr,  # [L]
    inputs_ptr,  # [L, max_tree_rows, C]
    gates_ptr,  # [L, max_tree_rows, 3, Hv]
    starts_ptr,  # [R]
    state_indices_ptr,  # [groups, R]
    tail_lens_ptr,  # [R]
    path_rows_ptr,  # [R, P]
    path_lens_ptr,  # [R]
    state_stride_n,
    state_stride_h,
    state_stride_v,
    conv_stride_n,
    conv_stride_c,
    conv_stride_t,
    weight_stride,
    inputs_stride_l,
    inputs_stride_t,
    gates_stride_l,
    gates_stride_t,
    gates_stride_g,
    index_stride,
    path_stride,
    WIDTH: tl.constexpr,
    INPUT: tl.constexpr,
    STATE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
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

    states = tl.cast(tl.load(states_ptr + layer), tl.pointer_type(STATE))
    conv_states = tl.cast(tl.load(conv_states_ptr + layer), tl.pointer_type(INPUT))
    conv_states += state_index * conv_stride_n
    weights = tl.cast(tl.load(weights_ptr + layer), tl.pointer_type(WEIGHT))
    biases = weights
    if BIAS:
        biases = tl.cast(tl.load(biases_ptr + layer), tl.pointer_type(WEIGHT))
    start = tl.load(starts_ptr + req).to(tl.int64)
    inputs_ptr += layer * inputs_stride_l + start * inputs_stride_t
    gates_ptr += layer * gates_stride_l + start * gates_stride_t + head
    path_rows_ptr += req * path_stride

    dim = tl.arange(0, BLOCK_K)
    in_dim = dim < KEY_DIM
    in_columns = column < VALUE_DIM
    key_channel = KEY_HEADS * KEY_DIM + head // GROUP * KEY_DIM + dim
    value_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    in_state = in_columns[:, None] & in_dim[None, :]
    state_ptrs = (
        states
        + state_index * state_stride_n
        + head * state_stride_h
        + column[:, None] * state_stride_v
        + dim[None, :]
    )
    state = tl.load(state_ptrs, mask=in_state, other=0.0).to(tl.float32)
    for step in range(0, path_len):
        k = _path_conv(
            inputs_ptr,
            inputs_stride_t,
            conv_states,
            conv_stride_c,
            conv_stride_t,
            weights,
            weight_stride,
            biases,
            path_rows_ptr,
            step,
            key_channel,
            in_dim,
            WIDTH,
            BIAS,
            SILU,
        )
        v = _path_conv(
            inputs_ptr,
            inputs_stride_t,
            conv_states,
            conv_stride_c,
            conv_stride_t,
            weights,
            weight_stride,
            biases,
            path_rows_ptr,
            step,
            value_channel,
            in_columns,
            WIDTH,
            BIAS,
            SILU,
        )
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        gates = gates_ptr + tl.load(path_rows_ptr + step) * gates_stride_t
        state *= tl.exp(tl.load(gates))
        u = tl.load(gates + gates_stride_g) * (v - tl.sum(state * k[None, :], 1))
        state += u[:, None] * k[None, :]
    tl.store(state_ptrs, state.to(STATE), mask=in_state)


@triton.jit
def _path_conv(
    inputs_ptr,
    inputs_stride_t,
    conv_states_ptr,
    conv_stride_c,
    conv_stride_t,
    weights_ptr,
    weight_stride,
    biases_ptr,
    path_rows_ptr,
    step,
    channel,
    there,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Output of the convolution at a step of the path, rounded as `inputs.py` rounds; float32."""
    acc = tl.zeros(channel.shape, tl.float32)
    if BIAS:
        acc += tl.load(biases_ptr + channel, mask=there, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        at = step - (WIDTH - 1) + tap
        if at >= 0:
            row = tl.load(path_rows_ptr + at)
            x = tl.load(inputs_ptr + row * inputs_stride_t + channel, mask=there, other=0.0)
        else:
            # Committed input at + WIDTH - 1, oldest first.
            x = tl.load(
                conv_states_ptr + (step + tap) * conv_stride_t + channel * conv_stride_c,
                mask=there,
                other=0.0,
            )
        weight = tl.load(weights_ptr + channel * weight_stride + tap, mask=there, other=0.0)
        acc += rounded_product(x, weight)
    if SILU:
        acc = acc / (1 + tl.exp(-acc))
    return acc.to(inputs_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _move_inputs_kernel(
    conv_states_ptr,  # [L] of [N, NUM_CHANNELS, WIDTH - 1 or more]
    groups_ptr,  # [L]
    inputs_ptr,  # [L, max_tree_rows, NUM_CHANNELS]
    starts_ptr,  # [R]
    state_indices_ptr,  # [groups, R]
    tail_lens_ptr,  # [R]
    path_rows_ptr,  # [R, P]
    path_lens_ptr,  # [R]
    conv_stride_n,
    conv_stride_c,
    conv_stride_t,
    inputs_stride_l,
    inputs_stride_t,
    index_stride,
    path_stride,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    layer = tl.program_id(1).to(tl.int64)
    req = tl.program_id(2)
    path_len = tl.minimum(tl.load(path_lens_ptr + req), tl.load(tail_lens_ptr + req))
    group = tl.load(groups_ptr + layer)
    state_index = tl.load(state_indices_ptr + group * index_stride + req).to(tl.int64)
    if (path_len <= 0) | (state_index <= 0):
        return

    there = channel < NUM_CHANNELS
    conv_states = tl.cast(tl.load(conv_states_ptr + layer), tl.pointer_type(INPUT))
    conv_states += state_index * conv_stride_n + channel * conv_stride_c
    start = tl.load(starts_ptr + req).to(tl.int64)
    inputs_ptr += layer * inputs_stride_l + start * inputs_stride_t + channel
    # A channel is one thread's, and each input comes from further on: what is overwritten has been
    # read.
    for age in tl.static_range(WIDTH - 1):
        step = path_len - (WIDTH - 1) + age
        if step >= 0:
            row = tl.load(path_rows_ptr + req * path_stride + step)
            x = tl.load(inputs_ptr + row * inputs_stride_t, mask=there, other=0.0)
        else:
            x = tl.load(conv_states + (age + path_len) * conv_stride_t, mask=there, other=0.0)
        tl.store(conv_states + age * conv_stride_t, x, mask=there)
