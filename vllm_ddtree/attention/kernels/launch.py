# SPDX-License-Identifier: Apache-2.0
"""What the launches of several kernels depend on: the GPU's size, the height of a tile, a dtype."""

import functools
from typing import Any

import torch
from vllm.triton_utils import tl, triton


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block of threads may have; 0 where there is none."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0)


def packed_rows_block(num_packed_rows: int) -> int:
    """Smallest tile height that tl.dot accepts and that holds `num_packed_rows` rows."""
    return max(16, triton.next_power_of_2(num_packed_rows))


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's dtype of the same name."""
    return getattr(tl, str(dtype).removeprefix("torch."))
