# SPDX-License-Identifier: Apache-2.0
"""Token limits under which a tree would never be scheduled whole are refused at start."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.conftest import Pair
from vllm_ddtree import integration
from vllm_ddtree.budget.tiers import SCHEDULE, TIERS


def make(pair: Pair, spec: dict[str, Any], **engine: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_ddtree.plugin import register

    register()
    settings = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, **engine}
    config = {"method": "ddtree", "model": str(pair.drafter), **spec}
    return EngineArgs(
        model=str(pair.target), speculative_config=config, **settings
    ).create_engine_config()


@pytest.mark.parametrize(
    ("engine", "flag", "needed"),
    [
        # A one-token prompt padded to a whole tree would wait for ever.
        ({"max_num_batched_tokens": 65}, "--max-num-batched-tokens=65", "71"),
        ({"max_num_scheduled_tokens": 16}, "--max-num-scheduled-tokens=16", "64"),
        ({"long_prefill_token_threshold": 16}, "--long-prefill-token-threshold=16", "64"),
    ],
)
def test_too_few_tokens_for_one_tree(
    nano_pair: Pair, engine: dict[str, Any], flag: str, needed: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        make(nano_pair, {"budget": 63}, **engine)
    message = str(refusal.value)
    assert flag in message and needed in message and "budget" in message
    assert "\n" not in message


def test_running_requests_are_limited_by_the_draft_not_by_the_budget(nano_pair: Pair) -> None:
    config = make(nano_pair, {"budget": 63}, max_num_seqs=128, max_num_batched_tokens=1024)
    # 1024 tokens: 128 draft blocks of 8, but only 16 trees.
    assert config.scheduler_config.max_num_active_seqs == 128


def captured_budgets(config: Any, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Nodes a request of the verify graphs that vLLM's manager would capture."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    sizes = [2**k for k in range(10)]
    config.compilation_config.cudagraph_capture_sizes = sizes
    config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", Mock)
    monkeypatch.setattr(cudagraph_utils, "current_platform", Mock())
    rows = config.speculative_config.budget + 1
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), mode, rows)
    full = integration.full_graphs(manager)
    return {desc.uniform_token_count - 1 for desc in full if desc.uniform_token_count}


def test_auto_has_graphs_for_every_budget(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few requests may run: vLLM alone captures what its schedule would use."""
    config = make(nano_pair, {"budget": "auto"}, max_num_seqs=1)
    assert captured_budgets(config, monkeypatch) == set(TIERS)


def test_a_users_schedule_has_graphs_for_its_own_budgets(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is the one from which auto starts."""
    schedule = [list(entry) for entry in SCHEDULE]
    config = make(nano_pair, {"budget_per_batch_size": schedule}, max_num_seqs=10)
    spec = config.speculative_config
    assert spec.num_speculative_tokens_per_batch_size == SCHEDULE
    assert captured_budgets(config, monkeypatch) == {63, 31, 15}
    config = make(nano_pair, {"budget": 31, "top_k": 4}, max_num_seqs=10)
    assert captured_budgets(config, monkeypatch) == {31}


def test_a_vllm_without_a_version_is_refused_not_broken(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "dev")
    integration.check.cache_clear()
    try:
        with pytest.raises(ValueError, match="'dev'"):
            make(nano_pair, {})
    finally:
        integration.check.cache_clear()
