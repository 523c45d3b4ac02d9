# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Iterator

import pytest
import torch

# Read when vLLM first starts: the engine core in this process, so that a test sees into it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(autouse=True)
def tensors_on_device(request: pytest.FixtureRequest, device: str) -> Iterator[None]:
    """Tensors that a kernel test makes lie where its kernels run. Engines place theirs."""
    if "engine" in request.path.name:
        yield
        return
    with torch.device(device):
        yield
