# SPDX-License-Identifier: Apache-2.0
"""After a tree the drafter's context is the path's rows and nothing else."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ddtree.proposer.context import ContextRows
from vllm_ddtree.round.paths import Paths

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_states", [1, 3, 5])
@pytest.mark.parametrize(("rows", "depth"), [([8, 8, 8], 5), ([64], 15), ([4, 2, 3], 3)])
def test_gather(rows: list[int], depth: int, num_states: int) -> None:
    generator = torch.Generator().manual_seed(len(rows) + num_states)
    context_rows = min(depth, max(rows) - 1) + 1
    context = ContextRows(max_num_reqs=4, rows=context_rows, device=DEVICE)
    starts = np.concatenate([[0], np.cumsum(rows)])
    total, size = int(starts[-1]), 24
    states = [torch.randn(total + 3, size, generator=generator).to(DEVICE) for _ in range(3)]
    states = (states * 2)[:num_states]
    positions = torch.randint(0, 900, (total + 3,), generator=generator)
    lengths = [
        1 + int(torch.randint(0, min(depth + 1, n), (1,), generator=generator)) for n in rows
    ]
    path = torch.arange(total + 3)
    for start, number, length in zip(starts, rows, lengths, strict=False):
        # Rows of a path rise from the root.
        chosen = torch.randperm(number - 1, generator=generator)[: length - 1].sort().values + 1
        path[start + 1 : start + length] = start + chosen

    def put(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(DEVICE)

    batch: Any = SimpleNamespace(
        num_reqs=len(rows),
        num_tokens=total,
        query_start_loc=put(starts),
        positions=put(positions, torch.int64),
        idx_mapping="as it was",
    )
    paths = Paths.empty(len(rows), depth, total + 3, DEVICE)
    paths.gather_index.copy_(path)
    rejected = put([n - length for n, length in zip(rows, lengths, strict=True)])
    compact, (gathered,), left = context.gather(paths, batch, states, rejected)
    assert compact.num_reqs == batch.num_reqs and compact.idx_mapping == "as it was"
    assert compact.num_tokens == len(rows) * context_rows == gathered.shape[0]
    assert compact.num_scheduled_tokens.tolist() == [context_rows] * len(rows)
    assert batch.num_tokens == total
    both = torch.cat(states, dim=-1)
    for i, length in enumerate(lengths):
        first = int(compact.query_start_loc[i])
        assert first == compact.query_start_loc_np[i] == i * context_rows
        wanted = path[starts[i] : starts[i] + length].to(DEVICE)
        assert torch.equal(gathered[first : first + length], both[wanted])
        linear = positions[starts[i] : starts[i] + length].to(DEVICE)
        assert torch.equal(compact.positions[first : first + length], linear)
        assert left[i] == context_rows - length
    assert int(compact.query_start_loc[-1]) == compact.num_tokens
    short = both.new_empty(compact.num_tokens - 1, both.shape[1])
    with pytest.raises(ValueError, match="room for"):
        context.gather(paths, batch, states, rejected, short)
