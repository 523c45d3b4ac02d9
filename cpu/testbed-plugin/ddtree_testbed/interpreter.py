# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, mended: it runs kernels that a GPU runs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from triton.runtime import interpreter


@functools.cache  # once: a second time would wrap what the first put there
def mend() -> None:
    """Lets loads, stores and atomics take the masks of vLLM's grammar and n-gram kernels, and ours.

    The interpreter keeps some int1 results as wider integers, and then refuses them as masks. It
    also stops at the maximum of nothing but NaN, of which a GPU takes some element.
    """
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    atomic = builder.create_atomic_rmw

    def as_bool(mask: Any) -> Any:
        if mask.data.dtype == bool:
            return mask
        return interpreter.TensorHandle((mask.data & 1).astype(bool), mask.dtype)

    def masked_load(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        return load(self, ptrs, as_bool(mask), *args)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        return store(self, ptrs, value, as_bool(mask), cache_policy)

    def atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *args: Any) -> Any:
        return atomic(self, op, ptr, val, as_bool(mask), *args)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    builder.create_atomic_rmw = atomic_rmw

    min_max = interpreter.ReduceOps.min_max

    def without_nan(self: Any, data: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        if idx_reduce_op is np.nanargmax:
            idx_reduce_op = argmax
        return min_max(self, data, val_reduce_op, idx_reduce_op)

    def argmax(data: Any, **where: Any) -> Any:
        return np.argmax(np.where(np.isnan(data), -np.inf, data), **where)

    interpreter.ReduceOps.min_max = without_nan
