# SPDX-License-Identifier: Apache-2.0
"""Every column of the latent benchmark is a form that runs; what it times needs a GPU."""

import pytest
import torch

from benchmarks import latent as benchmark
from tests.attention import latent_fakes


def test_every_column_runs(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    latent_fakes.install(monkeypatch)
    from vllm.v1.attention.ops import flashmla

    monkeypatch.setattr(flashmla, "get_mla_metadata", latent_fakes.get_mla_metadata)
    monkeypatch.setattr(benchmark, "TILES", (16,))
    for name, size in {"RANK": 32, "ROPE": 16, "KV_BLOCK": 16}.items():
        monkeypatch.setattr(benchmark, name, size)
    written = {}
    with torch.device(device):
        case = benchmark.Case(heads=2, budget=2, batch=2, context=20, layers=1)
        for column in benchmark.COLUMNS:
            if not column.endswith(("32", "64")):
                case.out.fill_(float("nan"))
                case.form(column)()
                written[column] = not bool(case.out.isnan().any())
    # These give tensors of their own.
    assert [column for column, in_out in written.items() if not in_out] == [
        "prefix FLASHMLA",
        "prefix tile 16",
        "chain FLASH_ATTN_MLA",
    ]
