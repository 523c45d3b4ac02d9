# SPDX-License-Identifier: Apache-2.0
"""Two ranks hold the same trees in every round, and give the tokens and rounds of one rank.

vLLM's multiprocess executor, two workers of the CPU engine, sums over gloo. Every rank drafts from
its own half of the vocabulary and the candidates of the other, and verifies and walks for itself,
from logits that vLLM gathers. The requests are without near-ties: vLLM's sums over two ranks, in
another order, change none of their tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import NANO
from tests.engine.harness import PROMPTS, Result, generate, greedy, open_engine, run_engine
from tests.engine.ranks import check_heads, gathered, record, rounds, watch_gathers
from vllm_ddtree.budget import auto
from vllm_ddtree.budget.cost import Costs
from vllm_ddtree.budget.tiers import TIERS
from vllm_ddtree.integration import follow, observe_steps
from vllm_ddtree.round.meter import read_meter

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

ENGINE: dict[str, Any] = {
    "block_size": 32,
    "max_num_seqs": 4,
    "max_model_len": 112,
    "kv_cache_memory_bytes": 4 << 20,
}
# Without graphs to measure, its schedule: 63 nodes up to two running requests, 31 up to eight.
SPEC: dict[str, Any] = {"method": "ddtree", "model": str(NANO.drafter), "budget": "auto"}
REQUESTS: list[tuple[str, int, dict[str, Any]]] = [
    (PROMPTS[0], 10, {}),
    (PROMPTS[1], 9, {"temperature": 1.0, "seed": 1}),
    (PROMPTS[5], 5, {"presence_penalty": 0.5}),  # a chain
    (PROMPTS[2], 7, {"temperature": 0.6, "seed": 2, "top_p": 0.9, "top_k": 20}),
]


def batch() -> tuple[list[str], list[SamplingParams]]:
    prompts, tokens, sampling = zip(*REQUESTS, strict=True)
    return list(prompts), [greedy(n, **more) for n, more in zip(tokens, sampling, strict=True)]


@functools.cache
def one_rank(speculates: bool) -> Result:
    return run_engine(NANO.target, SPEC if speculates else None, *batch(), **ENGINE)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LLM]:
    one_rank(False), one_rank(True)  # before: a new engine takes over vLLM's counters
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DDTREE_CHECK", "1")
        with open_engine(NANO.target, SPEC, tensor_parallel_size=2, **ENGINE) as llm:
            llm.collective_rpc(record)
            llm.collective_rpc(watch_gathers)
            yield llm


def test_same_tokens_and_rounds_as_one_rank(ranks: LLM) -> None:
    result = generate(ranks, *batch())
    assert result.token_ids == one_rank(False).token_ids
    assert result.token_ids == one_rank(True).token_ids
    assert result.counters == one_rank(True).counters
    assert result.counters.num_accepted_tokens > 0
    assert rounds(ranks) > 5
    # A draft gathers once: of each position 16 candidates and the sum of a shard, 8 bytes each.
    for drafts in ranks.collective_rpc(gathered):
        assert len(drafts) > 5
        for ((rows, _), size), *more in drafts:
            assert size == rows * 17 * 8 and rows % 7 == 0 and not more
    check_heads(ranks)


def corrupt(worker: Any, request: str) -> None:
    """On the second rank, the last row of a request's tree sees every row."""
    from vllm.distributed import parallel_state

    state = worker.model_runner.model_state
    prepare_inputs, rows = state.prepare_inputs, state.runtime.rows

    def corrupted(batch: Any, *args: Any) -> Any:
        for i, name in enumerate(batch.req_ids):
            if name.startswith(request) and int(rows.tail_lens[i]) > 2:
                rows.masks[int(batch.query_start_loc[i + 1]) - 1] = -1
        return prepare_inputs(batch, *args)

    if parallel_state.get_tensor_model_parallel_rank() == 1:
        state.prepare_inputs = corrupted


def mend(worker: Any) -> None:
    worker.model_runner.model_state.__dict__.pop("prepare_inputs", None)


def test_what_another_rank_finds_stops_the_request(ranks: LLM) -> None:
    """The first rank alone answers the scheduler."""
    ranks.collective_rpc(corrupt, args=(f"{ranks.request_counter.counter + 1}-",))
    result = generate(ranks, *batch())
    ranks.collective_rpc(mend)
    reasons = [output.outputs[0].finish_reason for output in result.outputs]
    assert reasons == ["length", "error", "length", "length"]
    reason = result.outputs[1].outputs[0].stop_reason
    assert "a row sees itself and its ancestors" in str(reason)
    for i in (0, 2, 3):
        assert result.token_ids[i] == one_rank(False).token_ids[i]
    assert rounds(ranks) > 5


def test_to_the_length_limit(ranks: LLM) -> None:
    """Steps with fewer nodes and at last none; the tests after this one go on."""
    result = generate(ranks, [PROMPTS[5]], greedy(99))
    prompt = len(result.outputs[0].prompt_token_ids)
    assert prompt + len(result.token_ids[0]) == ENGINE["max_model_len"]
    assert rounds(ranks) > 3


def test_requests_without_a_seed(ranks: LLM) -> None:
    """Each rank draws the seed itself."""
    params = [greedy(8, temperature=1.0), greedy(6, temperature=0.7)]
    result = generate(ranks, PROMPTS[2:4], params)
    assert [len(tokens) for tokens in result.token_ids] == [8, 6]
    assert rounds(ranks) > 2


def test_the_scheduler_reads_the_meter(ranks: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `"budget": "auto"` does where graphs have been measured, over the workers' meters."""
    monkeypatch.setattr(auto, "READ_EVERY", 4)
    monkeypatch.setattr(auto, "READ_AFTER", 2)
    core = ranks.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    for calls in ("scheduled", "observers"):
        monkeypatch.setattr(follow(scheduler), calls, [*getattr(follow(scheduler), calls)])
    monkeypatch.setattr(scheduler, "dynamic_sd_lookup", scheduler.dynamic_sd_lookup)
    # Up to three nodes cost nothing, more cost much.
    costs = Costs({(n + 1, 4): 5.0 if n <= 3 else 50.0 for n in TIERS})
    observer = auto.attach(core, costs)
    assert observer is not None
    observe_steps(scheduler, [observer])
    chosen = scheduler.dynamic_sd_lookup
    result = generate(ranks, *batch())
    assert result.token_ids == one_rank(False).token_ids
    counters = result.counters
    assert 0 < counters.num_draft_tokens <= 3 * counters.num_drafts
    one, other = ranks.collective_rpc(read_meter)
    assert one == other and one[0][0] > 0
    assert chosen.acceptance.rounds > 0, "no meter was read"
    assert rounds(ranks) > 5
