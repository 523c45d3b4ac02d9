# SPDX-License-Identifier: Apache-2.0
"""An attention implementation's whole forward on a GPU, once or from a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch

from tests.attention.tree_cases import Batch


def run(forward: Callable[[], object], output: torch.Tensor, in_graph: bool) -> None:
    """Call what writes `output`, or replay it."""
    forward()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        output.fill_(float("nan"))
        graph.replay()


def assert_forward(
    impl: Any,
    batch: Batch,
    metadata: Any,
    expected: torch.Tensor,  # [T, Hq, Dh] float64
    in_graph: bool,
) -> None:
    """The output over the batch's bfloat16 cache is as expected, up to its rounding."""
    # [num_blocks, Hkv, block_size, K | V]
    cache = torch.cat([batch.k_cache, batch.v_cache], dim=-1).transpose(1, 2)
    output = torch.empty_like(batch.query)

    arguments = torch.nn.Module(), batch.query, batch.key, batch.value, cache, metadata, output
    run(lambda: impl.forward(*arguments), output, in_graph)
    unit = torch.finfo(torch.bfloat16).eps
    largest = float(torch.nan_to_num(batch.v_cache).abs().max())
    torch.testing.assert_close(output.double(), expected, rtol=unit, atol=2 * unit * largest)
