# SPDX-License-Identifier: Apache-2.0
"""An engine with `VLLM_DDTREE_CHECK=1`: silent on a right engine, not on a broken one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, Result, ddtree, greedy, run_engine

# The second verifies a chain inside the tree's rows.
PARAMS: list[dict[str, Any]] = [{}, {"presence_penalty": 0.5}, {"temperature": 0.8, "seed": 5}]


def run(pair: Pair) -> Result:
    """Two slots for three requests: a prefill shares a step with a tree."""
    params = [greedy(12 - i, **more) for i, more in enumerate(PARAMS)]
    return run_engine(pair.target, ddtree(pair, 15), PROMPTS[:3], params, max_num_seqs=2)


@pytest.mark.parametrize("mixed_tree_tokens", [0, 1024], ids=["trees", "chains"])
def test_a_right_engine(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch, mixed_tree_tokens: int
) -> None:
    from vllm_ddtree import invariants, model_state

    steps = []
    check_step = invariants.check_step

    def counted(runtime: Any, *args: Any) -> Any:
        steps.append(runtime.step.as_chains)
        return check_step(runtime, *args)

    monkeypatch.setattr(invariants, "check_step", counted)
    monkeypatch.setattr(model_state, "MIXED_TREE_TOKENS", mixed_tree_tokens)
    monkeypatch.setenv("VLLM_DDTREE_CHECK", "1")
    result = run(nano_pair)
    assert len(steps) > 5 and any(steps) == bool(mixed_tree_tokens)
    assert result.counters.num_accepted_tokens > 0


def test_an_engine_that_moves_nothing(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ddtree.commit.kv import KVCompactor

    monkeypatch.setattr(KVCompactor, "compact", lambda *args: None)
    monkeypatch.setenv("VLLM_DDTREE_CHECK", "1")
    with pytest.raises(RuntimeError, match=r"request '\d.*accepted rows = compacted rows"):
        run(nano_pair)
