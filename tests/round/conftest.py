# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def tensors_on_device(device: str) -> Iterator[None]:
    """Tensors that a test makes lie where its kernels run."""
    with torch.device(device):
        yield
