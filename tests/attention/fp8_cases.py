# SPDX-License-Identifier: Apache-2.0
"""Verify batches over an fp8 cache: as vLLM stores them, and as the numbers that they stand for."""

import dataclasses
from types import SimpleNamespace

import torch

from vllm_ddtree.attention.kernels.scales import Scales

from .tree_cases import Batch, in_dtype

FP8 = torch.float8_e4m3fn
# Of query, key and value: one a layer, or one a KV head. Away from 1, so that one left out shows.
PER_TENSOR = (torch.tensor(0.02), torch.tensor(0.3), torch.tensor(1.7))
PER_HEAD = (torch.tensor([0.02, 0.01]), torch.tensor([0.3, 0.01]), torch.tensor([1.7, 0.2]))


def round_to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [..., heads, dim] / scale in fp8, saturated, with the strides of x."""
    largest = torch.finfo(FP8).max
    return in_dtype((x.float() / scale[..., None]).clamp(-largest, largest), FP8, like=x)


def quantise(
    batch: Batch, scales: tuple[torch.Tensor, ...], fp8_query: bool = True
) -> tuple[Batch, Batch, Scales]:
    """The batch with an fp8 cache (and query), and with float64 numbers instead of them.

    scales  of query, key and value, of one element or [Hkv] each

    key and value, this step's rows before they were rounded, stay as they are: nothing may read
    them. The third is what the kernels take.
    """
    device = batch.query.device
    num_kv_heads = batch.k_cache.shape[2]
    by_head = [scale.to(device).expand(num_kv_heads) for scale in scales]
    q_scale = by_head[0].repeat_interleave(batch.query.shape[1] // num_kv_heads)
    k_cache = round_to_fp8(batch.k_cache, by_head[1])
    v_cache = round_to_fp8(batch.v_cache, by_head[2])
    query, exact_query = batch.query, batch.query.double()
    if fp8_query:
        query = round_to_fp8(query, q_scale)
        exact_query = query.double() * q_scale[:, None]
    stored = dataclasses.replace(batch, query=query, k_cache=k_cache, v_cache=v_cache)
    exact = dataclasses.replace(
        batch,
        query=exact_query,
        k_cache=k_cache.double() * by_head[1][:, None],
        v_cache=v_cache.double() * by_head[2][:, None],
    )
    return stored, exact, Scales(by_head[0], by_head[1], by_head[2], batch.query.dtype)


def layer_of(scales: Scales) -> SimpleNamespace:
    """A stand-in for vLLM's layer."""
    return SimpleNamespace(_q_scale=scales.query, _k_scale=scales.key, _v_scale=scales.value)
