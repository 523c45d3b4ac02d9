# SPDX-License-Identifier: Apache-2.0
"""Attention over an fp8 cache: its keys and values, and the queries, are numbers times a scale.

vLLM's backends multiply fp8 queries and keys, scale the scores, and scale what the values add up to
(model_executor/layers/attention/attention.py, v1/attention/ops/triton_unified_attention.py). Ours
do so too, with exact products: fp8 numbers are numbers of the model's dtype, in which they are
multiplied.
"""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_ddtree.attention.registry import FP8_CACHES


@dataclass(frozen=True)
class Scales:
    """Scales of one layer, float32 [Hkv] each; of stride 0 where its heads share one."""

    query: torch.Tensor
    """Not used where queries come in the model's dtype."""
    key: torch.Tensor
    value: torch.Tensor
    dtype: torch.dtype
    """The model's: what fp8 numbers are multiplied in."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Query's, key's, value's: as kernels take them."""
        return self.query, self.key, self.value

    def strides(self) -> tuple[int, ...]:
        """Of `tensors`, over heads."""
        return tuple(tensor.stride(0) for tensor in self.tensors())


def scales_of(impl: Any, layer: Any, dtype: torch.dtype) -> Scales | None:
    """A layer's scales; None if its cache is not quantised.

    impl   vLLM's attention implementation of the layer
    layer  vLLM's `Attention`: `_q_scale`, `_k_scale` and `_v_scale` have one element, or Hkv
    dtype  of the model
    """
    if impl.kv_cache_dtype not in FP8_CACHES:
        return None
    heads = impl.num_kv_heads
    given = (layer._q_scale, layer._k_scale, layer._v_scale)
    query, key, value = (scale.expand(heads) for scale in given)
    return Scales(query, key, value, dtype)


def check_dtypes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scales: Scales | None
) -> torch.dtype:
    """The dtype that a kernel multiplies in.

    Raises ValueError if keys and values are not fp8 with scales, or not the query's dtype without,
    or a query is neither fp8 nor of the model's dtype.
    """
    if scales is None:
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError(
                f"query {query.dtype}, key {key.dtype} and value {value.dtype} must agree"
            )
        return query.dtype
    if not key.dtype == value.dtype or key.dtype.itemsize != 1 or not key.is_floating_point():
        raise ValueError(f"scales are for fp8, not for key {key.dtype} and value {value.dtype}")
    if query.dtype not in (key.dtype, scales.dtype):
        raise ValueError(f"query {query.dtype} is neither {key.dtype} nor {scales.dtype}")
    return scales.dtype
