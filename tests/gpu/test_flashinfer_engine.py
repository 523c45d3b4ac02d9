# SPDX-License-Identifier: Apache-2.0
"""An engine on vLLM's FlashInfer backend gives the target's own texts, whole verify steps in CUDA
graphs.

FULL graphs need FlashInfer's XQA kernels for the steps that are vLLM's own. vLLM takes them where
it can reach NVIDIA's server of kernels or `VLLM_HAS_FLASHINFER_CUBIN=1` says that none is needed:
on Hopper FlashInfer compiles them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Pair
from tests.gpu.engines import GRAPHS, check_gaps, gaps, serve, spec

pytest.importorskip("flashinfer")


def test_served(small_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ddtree.attention.backends.flashinfer_prefix import PrefixPlan

    captured = set()
    run = PrefixPlan.run

    def noted(self: Any, *args: Any) -> Any:
        captured.add((self.num_reqs, self.length, self.segments))
        return run(self, *args)

    monkeypatch.setattr(PrefixPlan, "run", noted)
    served = serve(small_pair, spec(small_pair, 31), attention_backend="FLASHINFER", **GRAPHS)
    print(served.result.counters.acceptance_length, dict(served.replays), sorted(captured))
    assert served.result.counters.num_accepted_tokens > 0
    assert served.replays and {length for _, length, _ in captured} == {32}
    assert served.compiled == []
    check_gaps(gaps(small_pair, served.judged))
