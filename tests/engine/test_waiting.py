# SPDX-License-Identifier: Apache-2.0
"""No running request waits because of the width of another one's tree.

A step of 72 tokens holds one tree of 63 nodes. Four requests that decode at once all go on in
every step, with smaller trees, and so does a prefill beside them. vLLM's chain of 7 is the
yardstick: there a request waits two steps at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, Result, dflash, generate, greedy, keep_async, open_engine

if TYPE_CHECKING:
    from vllm import LLM

ENGINE: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 8 << 20,
}
FEW = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 72}
MOST_STEPS = 2
"""Steps that a running request may wait, as with vLLM's chain."""


class Waits:
    """The longest time, in steps, that a running request was not scheduled, by its state."""

    def __init__(self, llm: LLM) -> None:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.decode = self.prefill = self.steps = 0
        since: dict[str, int] = {}
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            decodes = {r.request_id: not r.is_prefill_chunk for r in scheduler.running}
            output = schedule(*args, **kwargs)
            if not output.num_scheduled_tokens:
                return output
            self.steps += 1
            for name, decoding in decodes.items():
                waited = 0 if name in output.num_scheduled_tokens else since.get(name, 0) + 1
                since[name] = waited
                if decoding:
                    self.decode = max(self.decode, waited)
                else:
                    self.prefill = max(self.prefill, waited)
            return output

        scheduler.schedule = watched


def serve(pair: Pair, spec: dict[str, Any] | None, **engine: Any) -> tuple[Result, Waits]:
    with open_engine(pair.target, spec, **{**FEW, **engine}) as llm:
        waits = Waits(llm)
        return generate(llm, PROMPTS[:4], greedy(30)), waits


@pytest.fixture(scope="module")
def plain(nano_pair: Pair) -> list[list[int]]:
    return serve(nano_pair, None)[0].token_ids


def test_the_yardstick(nano_pair: Pair, plain: list[list[int]]) -> None:
    result, waits = serve(nano_pair, dflash(nano_pair))
    assert result.token_ids == plain
    assert waits.decode <= MOST_STEPS


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "keys",
    [{"budget": 63}, {"budget": "auto"}, {"budget_per_batch_size": [[1, 8, 31]]}],
    ids=["fixed", "auto", "schedule"],
)
def test_running_requests_all_go_on(
    nano_pair: Pair,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    asynchronous: bool,
) -> None:
    if asynchronous:
        keep_async(monkeypatch)
    spec = {"method": "ddtree", "model": str(nano_pair.drafter), **keys}
    result, waits = serve(nano_pair, spec)
    assert result.token_ids == plain
    assert waits.decode <= MOST_STEPS
    assert result.counters.num_accepted_tokens > 0


def test_a_prefill_goes_on_beside_wide_trees(nano_pair: Pair) -> None:
    """Three requests decode with 20 nodes each, which fill a step of 64 tokens; a prompt of 150
    tokens comes. It waits no longer than the trees let it."""
    long = list(range(300, 450))
    prompts: list[str | list[int]] = [*PROMPTS[:3], long]
    params = [greedy(40), greedy(40), greedy(40), greedy(2)]
    engine = {**FEW, "max_num_batched_tokens": 85, "max_model_len": 192}
    results = []
    for budget in (None, 20):
        spec = None
        if budget:
            spec = {"method": "ddtree", "model": str(nano_pair.drafter), "budget": budget}
        with open_engine(nano_pair.target, spec, **engine) as llm:
            waits = Waits(llm)
            results.append(generate(llm, prompts, params).token_ids)
    assert results[1] == results[0]
    assert waits.decode <= MOST_STEPS and waits.prefill <= MOST_STEPS


def test_decodes_behind_long_prefills_go_on(nano_pair: Pair) -> None:
    """Two prefills with a threshold of 64 tokens stand before six decodes in steps of 200."""
    prompts = [[5 + (7 * i + n) % 1900 for i in range(n)] for n in (400, 400, 1, 1, 1, 1, 1, 1)]
    engine = {
        **ENGINE,
        "max_model_len": 512,
        "max_num_batched_tokens": 200,
        "long_prefill_token_threshold": 64,
    }
    results = []
    for budget in (None, 31):
        spec = None
        if budget:
            spec = {"method": "ddtree", "model": str(nano_pair.drafter), "budget": budget}
        with open_engine(nano_pair.target, spec, **engine) as llm:
            waits = Waits(llm)
            results.append(generate(llm, prompts, greedy(20)).token_ids)
    assert results[1] == results[0]
    assert waits.decode <= MOST_STEPS
