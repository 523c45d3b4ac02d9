# SPDX-License-Identifier: Apache-2.0
"""Token limits under which a tree would never be scheduled whole are refused at start."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Pair


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
    active = getattr(config.scheduler_config, "max_num_active_seqs", None)
    # 1024 tokens: 128 draft blocks of 8, but only 16 trees.
    assert active in (None, 128)


def test_auto_has_graphs_for_every_budget(nano_pair: Pair) -> None:
    """However few requests may run: vLLM alone captures what its schedule would use."""
    from vllm.v1.worker.gpu import cudagraph_utils

    from vllm_ddtree.budget.auto import TIERS

    config = make(nano_pair, {"budget": "auto"}, max_num_seqs=1)
    schedule = config.speculative_config.num_speculative_tokens_per_batch_size
    lookup = cudagraph_utils.build_dynamic_sd_schedule_lookup
    limits = {"vllm_max_batch_size": 1, "vllm_num_speculative_tokens": 63}
    assert set(lookup(schedule, **limits)[1:]) == set(TIERS)
    assert lookup([(1, 4, 3)], **limits) == [0, 3]


def test_a_vllm_without_a_version_is_refused_not_broken(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    from vllm_ddtree import integration

    monkeypatch.setattr(vllm, "__version__", "dev")
    integration.check.cache_clear()
    try:
        with pytest.raises(ValueError, match="'dev'"):
            make(nano_pair, {})
    finally:
        integration.check.cache_clear()
