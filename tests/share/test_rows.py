# SPDX-License-Identifier: Apache-2.0
"""What vLLM's model runner is told of a step whose requests share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from tests.share.cases import random_trees
from vllm_ddtree.round.meter import ONE
from vllm_ddtree.round.paths import Paths
from vllm_ddtree.share.reference import BINS, WORTH, chances, share_nodes, worths
from vllm_ddtree.share.rows import SharedRows


@pytest.mark.parametrize("version", ["0.32", "0.33"])
@pytest.mark.parametrize("nodes", [0, 3, 9])
def test_a_step(nodes: int, version: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if version == "0.33":
        monkeypatch.setattr(adaptive_verification, "AdmittedDraftCounts", object, raising=False)
    elif hasattr(adaptive_verification, "AdmittedDraftCounts"):
        monkeypatch.delattr(adaptive_verification, "AdmittedDraftCounts")
    rng = np.random.default_rng(nodes)
    trees, indices = random_trees(rng, 4, 7, device)
    counts = torch.from_numpy(rng.integers(0, 50, (2, 32, BINS)))
    counts[0] *= ONE
    rows = SharedRows(trees)
    rows.calibration.counts[:, :, :BINS] = counts.to(device)

    step = rows.of_step(nodes)
    names = {str(i): 8 for i in range(4)}
    drafts = {name: [-1] * 7 for name in names}
    assert step.get_num_tokens(names, drafts) == 4 + nodes

    capacities = np.array([7, 7, 2, 7], dtype=np.int32)
    starts = np.cumsum([0, *(capacities + 1)], dtype=np.int32)
    host_rows, host_starts = step.compact_batch(capacities, capacities + 1, starts)
    assert host_rows.sum() == 4 + nodes and host_rows.max() - host_rows.min() <= 1
    assert host_starts.tolist() == [0, *np.cumsum(host_rows)]

    cu_num_logits, query_start_loc, total, *more = step.reallocate_drafts([*names], indices)
    claims, depths = trees.claims[indices, 0, 1:].cpu(), trees.depths[indices, 1:].cpu()
    value = chances(claims, depths, worths(counts))
    shares = share_nodes(value, torch.from_numpy(capacities), nodes)
    assert cu_num_logits.tolist() == [0, *np.cumsum(shares.numpy() + 1)]
    assert query_start_loc.tolist()[:5] == cu_num_logits.tolist()
    assert set(query_start_loc.tolist()[4:]) == {4 + nodes}
    assert total == nodes and more == ([None] if version == "0.33" else [])


def test_compiling_changes_nothing(device: str) -> None:
    trees, _ = random_trees(np.random.default_rng(1), 4, 7, device)
    rows = SharedRows(trees)
    rows.compile(Paths.empty(4, 7, 32, device))
    assert not rows.calibration.counts.any()
    assert (rows.calibration.worth == WORTH).all()
