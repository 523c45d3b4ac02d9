# SPDX-License-Identifier: Apache-2.0
"""The lattice benchmark measures what a round runs, and the parts that it says."""

from __future__ import annotations

import pytest
import torch

from benchmarks import lattice as benchmark
from benchmarks.lattice import COLUMNS, Case, measure, table_of
from vllm_ddtree.tree import lattice


@pytest.fixture
def case(device: str, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(benchmark, "VOCAB", 600)
    monkeypatch.setattr(benchmark, "RANK", 4)
    return Case(budget=12, batch=2, depth=15, top_k=5, device=device)


def test_case_is_a_round(case: Case) -> None:
    assert case.depth == 12  # a tree is no deeper than its budget
    case.normalise()
    assert torch.isfinite(case.log_probs).all() and (case.log_probs <= 0).all()
    case.check()
    assert case.trees.num_nodes.tolist() == [12, 12]
    case.drafts[0, 3] += 1
    case.lattice = lambda: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        case.check()


def test_every_column_is_measured_with_its_own_kernels(case: Case) -> None:
    seen = []

    def time(call) -> float:
        case.drafts.zero_()
        touched = lattice.TOUCHED
        call()
        seen.append((touched, bool(case.drafts.any())))
        return float(len(seen))

    before = (lattice.TOUCHED, lattice._build_lattice_trees_kernel)
    row = measure(case, time)
    assert (lattice.TOUCHED, lattice._build_lattice_trees_kernel) == before
    assert set(row) == set(COLUMNS)
    assert row["tree"] == row["lattice"] - row["rank"]
    usual = before[0]
    # unary, lattice, rank (grows nothing), not touched, and three that grow nothing
    expected = [(usual, True), (usual, True), (usual, False), (1, True), *[(usual, False)] * 3]
    assert seen == expected
    table = table_of([{"batch": 2.0, "budget": 12.0, **row}]).splitlines()
    assert len({line.count("|") for line in table}) == 1
