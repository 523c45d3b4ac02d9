# SPDX-License-Identifier: Apache-2.0
"""What the kernels take of an fp8 cache: its keys and values, and the queries, times a scale each.

vLLM's backends multiply fp8 queries and keys, scale the scores, and scale what the values add up to
(model_executor/layers/attention/attention.py, v1/attention/ops/triton_unified_attention.py). Ours
do so too, and their products are exact: fp8 numbers are numbers of the model's dtype, in which they
are multiplied.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scales:
    """Scales of one layer. Where its heads share one, the stride is 0."""

    query: torch.Tensor
    """float32 [Hkv]; not used where queries come in the model's dtype."""
    key: torch.Tensor
    """float32 [Hkv]."""
    value: torch.Tensor
    """float32 [Hkv]."""
    dtype: torch.dtype
    """The model's: what fp8 numbers are multiplied in."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Query's, key's, value's: as kernels take them."""
        return self.query, self.key, self.value

    def strides(self) -> tuple[int, ...]:
        """Of `tensors`, over heads."""
        return tuple(tensor.stride(0) for tensor in self.tensors())


def check_dtypes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scales: Scales | None
) -> torch.dtype:
    """The dtype that a kernel multiplies in.

    Raises:
        ValueError: without scales, if query, key and value differ. With scales, if keys and values
            are not fp8, or a query is neither fp8 nor of the model's dtype.

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


def check_latent_dtypes(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    cache: torch.Tensor,
    cache_scale: torch.Tensor | None,
) -> None:
    """Check a latent cache, which has one scale for keys and values, against its queries.

    Raises:
        ValueError: unless the cache has the queries' dtype, or is fp8 and has a scale.

    """
    scaled = cache.is_floating_point() and cache.element_size() == 1
    if query.dtype != query_rope.dtype or (not scaled and query.dtype != cache.dtype):
        raise ValueError(
            f"query {query.dtype}, {query_rope.dtype} and cache {cache.dtype} must agree"
        )
    if scaled != (cache_scale is not None):
        raise ValueError(f"a scale is for an fp8 cache, which needs one: this is {cache.dtype}")
