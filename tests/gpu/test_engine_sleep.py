# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake: the same tokens in the same rounds, so target and drafter are what they were."""

from __future__ import annotations

from typing import Any

from tests.conftest import Pair
from tests.engine.harness import PROMPTS
from tests.gpu.engines import ENGINE, GRAPHS, spec
from vllm_ddtree.testing.engine import generate, open_engine


def test_sleep(small_pair: Pair) -> None:
    """Level 1, weights first and the rest later, then level 2, whose weights vLLM reloads."""
    import torch
    from vllm import SamplingParams

    engine = {**ENGINE, **GRAPHS, "enable_sleep_mode": True, "max_num_seqs": 2}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)

    with open_engine(small_pair.target, spec(small_pair, 15), **engine) as llm:

        def rounds() -> list[Any]:
            # One at a time: no batch whose shape depends on when a request came.
            results = [generate(llm, [prompt], params) for prompt in PROMPTS[:4]]
            return [(result.token_ids, result.counters) for result in results]

        expected = rounds()
        assert sum(counters.num_accepted_tokens for _, counters in expected) > 40
        free, _ = torch.cuda.mem_get_info()

        llm.sleep(level=1)
        asleep, _ = torch.cuda.mem_get_info()
        assert asleep - free > ENGINE["kv_cache_memory_bytes"] // 2
        llm.wake_up()
        assert rounds() == expected, "level 1"

        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        llm.wake_up(tags=["kv_cache"])
        assert rounds() == expected, "level 1, in two steps"

        for _ in range(2):
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])
            assert rounds() == expected, "level 2"
