# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark measures real rounds: full trees, a path that is walked and moved."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import COLUMNS, Sizes, make_cases, table_of
from tests.attention import flashinfer_fakes

SIZES = Sizes(
    layers=2, heads=4, kv_heads=2, head_dim=16, hidden=8, vocab=600, states=2, depth=4, context=40
)


def variables(case) -> dict:
    """What a case's function closes over."""
    return dict(
        zip(case.__code__.co_freevars, (c.cell_contents for c in case.__closure__), strict=True)
    )


@pytest.mark.parametrize(("budget", "batch"), [(3, 2), (31, 1)])
def test_cases_are_a_round(budget: int, batch: int, device: str) -> None:
    cases = make_cases(SIZES, budget, batch, device, torch.float32, flash=False)
    assert set(cases) == set(COLUMNS) - {"FA prefix", "FA causal", "FlashInfer prefix"}
    build, walk, tail = (variables(cases[name]) for name in ("build", "walk", "tail"))
    caches = variables(cases["Triton prefix"])["caches"]
    before = [cache.clone() for cache in caches]
    for name, case in cases.items():
        if not name.startswith("compact"):
            case()
    assert build["trees"].num_nodes.tolist() == [budget] * batch
    assert tail["rows"].tail_lens.tolist() == [budget + 1] * batch
    assert tail["rows"].prefix_lens.tolist() == [SIZES.context] * batch
    assert torch.isfinite(tail["out"]).all()
    # The target's choice at each row is a child's token: the walk ends at a leaf.
    assert (walk["emitted"].num_sampled >= 2).all()

    cases["compact same"]()
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
    cases["compact"]()
    moves = budget > SIZES.depth  # else the longest path is the rows in order
    assert all(torch.equal(a, b) != moves for a, b in zip(caches, before, strict=True))


def test_flashinfer_reads_the_prefixes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_fakes.install(monkeypatch)
    given = (SIZES, 3, 2, device, torch.float32, False)
    cases = make_cases(*given, flashinfer=True)
    cases["FlashInfer prefix"]()
    found = variables(cases["FlashInfer prefix"])
    keys, values = found["caches"][-1].flatten(0, 1).chunk(2, dim=-1)
    first, rows = slice(SIZES.context), slice(4)  # of the first request
    scores = torch.einsum("nhd,mhd->hnm", found["query"][rows], keys[first].repeat_interleave(2, 1))
    weights = (scores * SIZES.head_dim**-0.5).softmax(-1)
    expected = torch.einsum("hnm,mhd->nhd", weights, values[first].repeat_interleave(2, 1))
    torch.testing.assert_close(found["out"][rows], expected, rtol=1e-4, atol=1e-4)


def test_table() -> None:
    row = {name: float(i) for i, name in enumerate(COLUMNS)} | {"batch": 1.0, "budget": 31.0}
    last = table_of([row], layers=2).splitlines()[-1].split(" | ")
    # top-k to compact without sampling: 0 + 1 + 2 + 4 + 5 + 6, FA prefix 8, tail 9, FA causal 10
    assert last[-2:] == [str(18 + 8 + 9 - 10), "4.50 |"]
