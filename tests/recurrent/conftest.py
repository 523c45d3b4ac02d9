# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import BED


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter(device: str) -> None:
    if BED is not None:
        BED.prepare()


@pytest.fixture(autouse=True)
def tensors_on_device(device: str) -> Iterator[None]:
    """Tensors that a test makes lie where its kernels run."""
    with torch.device(device):
        yield


@pytest.fixture(autouse=True)
def bfloat16_dots(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teach Triton's interpreter, which would multiply the bit patterns, bfloat16 products."""
    if device != "cpu":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return dot(self, widened(a), widened(b), *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
