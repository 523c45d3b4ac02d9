# SPDX-License-Identifier: Apache-2.0
"""Digests of what kernels give in this process (tests/cpu/test_quick.py)."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import ddtree_testbed

ddtree_testbed.set_environment()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
]
SIZE = 64


def digest(*tensors: torch.Tensor) -> str:
    """Of types, shapes and bytes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


@triton.jit
def _numbers_kernel(x_ptr, y_ptr, out_ptr, kind_ptr, SIZE: tl.constexpr):
    """Blocks and numbers, on either side; 0.0 and -0.0, True and 1, NaN; twice over."""
    at = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    zero = x.to(tl.float32) * 0.0
    for i in tl.static_range(2):
        row = out_ptr + i * 12 * SIZE + at
        tl.store(row, (x + 3).to(tl.float64))
        tl.store(row + SIZE, (7 - x).to(tl.float64))
        tl.store(row + 2 * SIZE, (x * 2.5).to(tl.float64))
        tl.store(row + 3 * SIZE, (x + y).to(tl.float64))
        tl.store(row + 4 * SIZE, (x * True).to(tl.float64))
        tl.store(row + 5 * SIZE, tl.where(x > 1, y, 1).to(tl.float64))
        tl.store(row + 6 * SIZE, 1.0 / (zero + 0.0))
        tl.store(row + 7 * SIZE, 1.0 / (-0.0 + zero))
        tl.store(row + 8 * SIZE, (zero + float("nan")).to(tl.float64))
        tl.store(row + 9 * SIZE, (x / 3).to(tl.float64))
        tl.store(row + 10 * SIZE, tl.maximum(x, y).to(tl.float64))
        tl.store(row + 11 * SIZE, tl.sum(tl.where(at[:, None] < at[None, :], y[:, None], 0), 0))
    tl.store(kind_ptr + at, ((at ^ 5) << 2) | (at & 1))


def numbers(dtype: torch.dtype, other: torch.dtype) -> str:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randint(0, 100, (SIZE,), generator=generator) for _ in range(2))
    out, kind = torch.zeros(24, SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.int32)
    _numbers_kernel[(1,)](x.to(dtype), y.to(other), out, kind, SIZE=SIZE)
    return digest(out, kind, torch.zeros(1, dtype=dtype))


def noise() -> str:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 1500, generator=generator)
    index = torch.tensor([0, 1, 2, 0, 1, 2])
    temperature = torch.tensor([0.0, 1.0, 0.6])
    seeds, positions = torch.tensor([1, -2, 1 << 40]), torch.arange(6)
    samples = [
        gumbel_sample(logits, index, temperature, seeds, positions, True, False, use_fp64=wide)
        for wide in (False, True)
    ]
    return digest(*samples)


def main() -> None:
    if sys.argv[1:] == ["quick"]:
        ddtree_testbed.prepare_interpreter()
    cases: dict[str, Any] = {"interpreter": interpreter._patch_builtin.__module__}
    for i, dtype in enumerate(DTYPES):
        cases[f"{dtype}"] = numbers(dtype, dtype)
        cases[f"{dtype}, {DTYPES[i - 3]}"] = numbers(dtype, DTYPES[i - 3])
    cases["noise"] = noise()
    print()
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
