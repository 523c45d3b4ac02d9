# SPDX-License-Identifier: Apache-2.0
"""Trees give plain decoding's text under all that the scheduler does: chunked prefill, prefix
caching, queues, preemption, aborts, limits."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.conftest import Pair
from tests.engine.harness import (
    PROMPTS,
    Result,
    ddtree,
    generate,
    greedy,
    keep_async,
    open_engine,
    run_engine,
)

SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}
LONG = PROMPTS[5]  # 101 tokens of nano
BLOCKS: dict[str, Any] = {"block_size": 32}


def accepted(result: Result) -> list[list[int]]:
    """Accepted nodes of each round of each request."""
    return [list(o.outputs[0].spec_decode_metrics.per_step_accepted) for o in result.outputs]


def drafted(result: Result) -> list[list[int]]:
    return [list(o.outputs[0].spec_decode_metrics.per_step_drafted) for o in result.outputs]


# Nine requests: more than there are slots in some tests below.
MANY = [PROMPTS[i] for i in (5, 0, 1, 2, 3, 4, 5, 3, 0)]
MANY_PARAMS: list[dict[str, Any]] = [{}, SEEDED, {}, {}, SEEDED, {}, SEEDED, SEEDED, {}]
MANY_TOKENS = [14, 12, 14, 6, 14, 1, 10, 14, 4]


@functools.cache
def plain(pair: Pair) -> Result:
    params = [greedy(n, **more) for n, more in zip(MANY_TOKENS, MANY_PARAMS, strict=True)]
    return run_engine(pair.target, None, MANY, params, **BLOCKS)


def run_many(pair: Pair, budget: int, **llm_kwargs: Any) -> Result:
    params = [greedy(n, **more) for n, more in zip(MANY_TOKENS, MANY_PARAMS, strict=True)]
    return run_engine(
        pair.target,
        ddtree(pair, budget),
        MANY,
        params,
        per_request_spec_decode_metrics="detailed",
        **{**BLOCKS, **llm_kwargs},
    )


@pytest.mark.parametrize("mixed_tree_tokens", [0, 1024], ids=["trees", "chains"])
def test_prefill_chunks_beside_trees_and_a_queue(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch, mixed_tree_tokens: int
) -> None:
    """Three slots for nine requests, steps of 60 tokens: chunks of the long prompts share steps
    with trees, which leave them half of the step and so have fewer nodes there. Trees keep their
    form in wide steps with prefills and become chains in narrow ones.
    """
    from vllm_ddtree import model_state
    from vllm_ddtree.round import plan

    formed = []
    as_chains = model_state.as_chains
    monkeypatch.setattr(plan, "MIXED_TREE_TOKENS", mixed_tree_tokens)

    def form(*args: Any) -> None:
        formed.append(args)
        as_chains(*args)

    monkeypatch.setattr(model_state, "as_chains", form)
    result = run_many(nano_pair, 12, max_num_seqs=3, max_num_batched_tokens=60)
    assert result.token_ids == plain(nano_pair).token_ids
    sizes = [n for request in drafted(result) for n in request]
    # Of a prompt's last token alone vLLM makes empty draft rows beside running requests: 0 nodes.
    assert max(sizes) == 12 and any(0 < size < 12 for size in sizes)
    assert len(formed) == 1 if mixed_tree_tokens == 0 else len(formed) > 1  # one at start
    assert result.counters.num_accepted_tokens > 0


def test_async_scheduling(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM turns it off on the CPU; with it on, the host knows only bounds of the lengths."""
    keep_async(monkeypatch)
    params = [greedy(n, **more) for n, more in zip(MANY_TOKENS, MANY_PARAMS, strict=True)]
    with open_engine(
        nano_pair.target, ddtree(nano_pair, 12), max_num_seqs=5, max_num_batched_tokens=96, **BLOCKS
    ) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        result = generate(llm, MANY, params)
    assert result.token_ids == plain(nano_pair).token_ids
    assert result.counters.num_accepted_tokens > 0


@pytest.mark.parametrize("keys", [{}, {"mean_budget": 4}], ids=["alone", "shared"])
def test_preemption(nano_pair: Pair, keys: dict[str, int]) -> None:
    """Ten KV blocks: two long requests cannot both grow, one is preempted and resumed."""
    prompts, tokens = [LONG, LONG + "\n", PROMPTS[3]], [30, 30, 8]
    params = [greedy(n, **more) for n, more in zip(tokens, ({}, SEEDED, {}), strict=True)]
    expected = run_engine(nano_pair.target, None, prompts, params, **BLOCKS)
    with open_engine(
        nano_pair.target,
        ddtree(nano_pair, 9, **keys),
        num_gpu_blocks_override=10,
        max_model_len=200,
        enable_prefix_caching=False,
        **BLOCKS,
    ) as llm:
        result = generate(llm, prompts, params)
        preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preempted > 0
    assert result.token_ids == expected.token_ids


def test_prefix_caching(nano_pair: Pair) -> None:
    """Requests with one long prefix, several times: hits, the same text, the same rounds."""
    prompts = [LONG, LONG + " x", LONG, LONG + "\n\n\ndef f", LONG]
    params = [greedy(10), greedy(10), greedy(10, **SEEDED), greedy(10), greedy(6)]
    expected = run_engine(nano_pair.target, None, prompts, params, **BLOCKS)
    with open_engine(
        nano_pair.target,
        ddtree(nano_pair, 12),
        enable_prefix_caching=True,
        max_num_seqs=3,
        per_request_spec_decode_metrics="detailed",
        **BLOCKS,
    ) as llm:
        rounds = []
        for _ in range(3):
            result = generate(llm, prompts, params)
            assert result.token_ids == expected.token_ids
            rounds.append(accepted(result))
        hits = next(m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits")
        cached = [output.num_cached_tokens for output in result.outputs]
        llm.reset_prefix_cache()
        cold = generate(llm, prompts, params)
    assert hits > 0 and min(cached) >= 64
    assert cold.token_ids == expected.token_ids
    # What a hit leaves in the drafter's cache too is what a full prefill would have.
    assert rounds[0] == rounds[1] == rounds[2] == accepted(cold)


def test_an_abort_leaves_the_others_right(nano_pair: Pair) -> None:
    """A request leaves in mid-generation, another takes its slot, with its own tree and seed."""
    prompts = [PROMPTS[0], LONG, PROMPTS[3]]
    params = [greedy(24), greedy(14, **SEEDED), greedy(14)]
    late = (PROMPTS[2], greedy(10, temperature=0.9, seed=8))
    expected = run_engine(
        nano_pair.target, None, [*prompts[1:], late[0]], [*params[1:], late[1]], **BLOCKS
    )
    with open_engine(nano_pair.target, ddtree(nano_pair, 12), max_num_seqs=3, **BLOCKS) as llm:
        engine = llm.llm_engine
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(i), prompt, param)
        finished: dict[str, list[int]] = {}
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
            if steps == 3:
                engine.abort_request(["0"])
                engine.add_request("3", *late)
        again = generate(llm, prompts[1:], params[1:])
    assert [finished[i] for i in ("1", "2", "3")] == expected.token_ids
    assert "0" not in finished or len(finished["0"]) < 24
    assert again.token_ids == expected.token_ids[:2]


def test_limits_and_stops(nano_pair: Pair) -> None:
    """One token; a prompt that leaves room for one; the length limit; stops in accepted paths."""
    limit = 102
    prompts = [LONG, LONG, LONG[:200], LONG[:40], LONG[:40]]
    params = [
        greedy(1),
        greedy(50),  # the prompt has max_model_len - 1 tokens
        greedy(99, **SEEDED),  # runs to the limit
        greedy(30, stop=["item", ":"], ignore_eos=False),
        greedy(30, stop=["self"], include_stop_str_in_output=True),
    ]
    keys = {"max_model_len": limit, **BLOCKS}
    expected = run_engine(nano_pair.target, None, prompts, params, **keys)
    assert [len(t) for t in expected.token_ids[:2]] == [1, 1]
    assert len(expected.outputs[0].prompt_token_ids) == limit - 1
    assert len(expected.token_ids[2]) == limit - len(expected.outputs[2].prompt_token_ids)
    result = run_engine(nano_pair.target, ddtree(nano_pair, 12), prompts, params, **keys)
    assert result.token_ids == expected.token_ids
    assert result.texts == expected.texts
    for a, b in zip(expected.outputs, result.outputs, strict=True):
        assert a.outputs[0].finish_reason == b.outputs[0].finish_reason
        assert a.outputs[0].stop_reason == b.outputs[0].stop_reason


def test_the_end_of_text_inside_a_tree(nano_pair: Pair) -> None:
    """Any token may be the end: the one that plain decoding emits fifth ends a request there."""
    free = run_engine(nano_pair.target, None, PROMPTS[:3], greedy(12), **BLOCKS)
    ends = [tokens[5] for tokens in free.token_ids]
    params = [greedy(12, stop_token_ids=[end], ignore_eos=False) for end in ends]
    expected = run_engine(nano_pair.target, None, PROMPTS[:3], params, **BLOCKS)
    result = run_engine(nano_pair.target, ddtree(nano_pair, 31), PROMPTS[:3], params, **BLOCKS)
    assert result.token_ids == expected.token_ids
    assert result.texts == expected.texts
    for tokens, cut, end in zip(free.token_ids, result.token_ids, ends, strict=True):
        assert cut == tokens[: tokens.index(end) + 1]
        assert len(cut) < len(tokens)
