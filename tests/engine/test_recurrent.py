# SPDX-License-Identifier: Apache-2.0
"""Targets with recurrent layers (gated delta net): trees give plain decoding's tokens, and the
rounds that are to be expected, under all that the scheduler does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import NANO, Pair
from tests.engine import models
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
from tests.engine.known import Plan, known_drafts, model_runner, now_and_then, on_chain, sibling
from tests.engine.ranks import record, rounds
from tests.oracle import Drafter, Trace
from tests.oracle.hybrid import HybridTarget

if TYPE_CHECKING:
    from vllm import LLM

# A round accepts four tokens: in the first four rows, or in four of eight.
BUDGET, DEPTH = 9, 4
BLOCK = 32
ENGINE: dict[str, Any] = {"block_size": BLOCK, "max_num_seqs": 4, "max_model_len": 192}
TOKENS: dict[str, Any] = {"skip_tokenizer_init": True, **ENGINE}
SEEDED = {"temperature": 0.9, "seed": 21}

SHORT = [[3, 5, 7, 9, 2, 4] * 6, [1, 2, 3], [7] * 20]
LENGTHS = [20, 24, 16]


@functools.cache
def pair(kind: str) -> Pair:
    make: dict[str, Callable[..., Pair]] = {
        "qwen3_5": models.qwen3_5,
        "qwen3_next": models.qwen3_next,
        "text": functools.partial(models.qwen3_5, tokenizer=NANO.target),
    }
    return make[kind](FOLDERS / kind)


FOLDERS = Path()


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    global FOLDERS
    FOLDERS = tmp_path_factory.mktemp("hybrid")
    yield
    pair.cache_clear()


def params(*more: dict[str, Any]) -> list[Any]:
    given = more or ({},) * len(LENGTHS)
    return [greedy(n, **each) for n, each in zip(LENGTHS, given, strict=True)]


@functools.cache
def plain(kind: str) -> Result:
    return run_engine(pair(kind).target, None, SHORT, params(), **TOKENS)


def accepted(result: Result) -> list[list[int]]:
    return [list(o.outputs[0].spec_decode_metrics.per_step_accepted) for o in result.outputs]


@pytest.mark.parametrize(
    ("kind", "caching"), [("qwen3_5", True), ("qwen3_5", False), ("qwen3_next", True)]
)
def test_rounds_are_the_oracles(kind: str, caching: bool) -> None:
    """The drafter's own trees: its context, too, is that of the accepted paths."""
    chosen = pair(kind)
    result = run_engine(
        chosen.target,
        ddtree(chosen, BUDGET),
        SHORT,
        params(),
        enable_prefix_caching=caching,
        per_request_spec_decode_metrics="detailed",
        **TOKENS,
    )
    assert result.token_ids == plain(kind).token_ids
    target: Any = HybridTarget.load(chosen.target)
    drafter = Drafter.load(chosen.drafter, target)
    total = 0
    for prompt, length, got in zip(SHORT, LENGTHS, accepted(result), strict=True):
        output = target.greedy(prompt, length + chosen.block_size)
        trace = Trace(target, drafter, prompt, output)
        rounds = trace.replay(budget=BUDGET, top_k=BUDGET, max_tokens=length)
        assert [r.accepted for r in rounds if r.num_nodes] == got
        total += sum(got)
    assert total > 5


def expected(sequence: list[int], prompt: int, plan: Plan, end: int) -> list[int]:
    """Accepted nodes of each round of a request whose drafts come from `sequence` by `plan`."""
    rounds, at = [], prompt + 1
    while at < end:
        right = 0
        while right < DEPTH and at + right < len(sequence) and plan(at + right) is not None:
            right += 1
        rounds.append(right)
        at += right + 1
    return rounds


# Prompts of the nano tokenizer's text, three with a long prefix in common.
LONG = PROMPTS[5]
REQUESTS: list[tuple[str, int, dict[str, Any]]] = [
    (LONG, 40, {}),
    (LONG + " x", 36, SEEDED),
    (PROMPTS[0], 30, {"logprobs": 3}),
    (PROMPTS[1], 24, {"presence_penalty": 0.6}),  # a chain
    (LONG + "\n\n\ndef f", 12, {"stop_token_ids": [1], "min_tokens": 9}),
    (PROMPTS[3], 16, {**SEEDED, "top_p": 0.9}),
    (PROMPTS[2], 18, {"structured": r"[a-c]{4}=[0-9]{6}"}),
]


def requests() -> tuple[list[str], list[Any]]:
    from vllm.sampling_params import StructuredOutputsParams

    prompts, given = [], []
    for prompt, length, more in REQUESTS:
        more = dict(more)
        if regex := more.pop("structured", None):
            more["structured_outputs"] = StructuredOutputsParams(regex=regex)
            more["ignore_eos"] = False
        prompts.append(prompt)
        given.append(greedy(length, **more))
    return prompts, given


def sequences(result: Result) -> list[list[int]]:
    return [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in result.outputs]


@functools.cache
def plain_text() -> tuple[Result, Result]:
    """Answers without speculation, and to prompts that are the beginnings of such answers."""
    with open_engine(pair("text").target, None, **ENGINE) as llm:
        first = generate(llm, *requests())
        return first, generate(llm, *followers(first))


def followers(first: Result) -> tuple[list[list[int]], list[Any]]:
    """Requests that go on from inside what others were answered: prefix hits at boundaries that
    accepted paths led over."""
    answers = sequences(first)
    prompts = [answers[0][:140], answers[1][:135], answers[0][:101]]
    # The first runs to the length limit.
    return prompts, [greedy(99), greedy(8, **SEEDED), greedy(24)]


@pytest.fixture(scope="module")
def text_engine() -> Iterator[LLM]:
    """Asynchronous scheduling, chunks of long prompts beside trees, prefix caching, all checks."""
    plain_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DDTREE_CHECK", "1")
        keep_async(patch)
        with open_engine(
            pair("text").target,
            # Else vLLM leaves out the last block of a hit, for the drafter's sake.
            ddtree(
                pair("text"), BUDGET, num_speculative_tokens=DEPTH, disable_eagle_block_drop=True
            ),
            enable_prefix_caching=True,
            # Else vLLM keeps states at the prompt's end alone.
            prefix_cache_retention_interval=2 * BLOCK,
            max_num_batched_tokens=80,
            per_request_spec_decode_metrics="detailed",
            **ENGINE,
        ) as llm:
            yield llm


@pytest.mark.parametrize(
    ("plan", "mixed_chains"),
    [(on_chain, False), (sibling, False), (now_and_then, False), (sibling, True)],
)
def test_all_that_a_client_asks(
    text_engine: LLM,
    plan: Plan,
    mixed_chains: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With drafts that are right: every token, and every round of the requests with trees.

    Steps that prefill, too, verify trees or chains.
    """
    state = model_runner(text_engine).model_state
    threshold = float("inf") if mixed_chains else 0
    monkeypatch.setattr(state, "_mixed_tree_tokens", threshold)
    first, second = plain_text()
    known = sequences(second) + sequences(first)
    known.sort(key=len, reverse=True)
    text_engine.reset_prefix_cache()
    with known_drafts(text_engine, known, plan):
        got = generate(text_engine, *requests())
        hits = generate(text_engine, *followers(first))
    assert got.token_ids == first.token_ids
    assert hits.token_ids == second.token_ids
    assert [o.num_cached_tokens for o in hits.outputs] == [128, 128, 64]
    assert len(hits.token_ids[0]) == ENGINE["max_model_len"] - 140
    for output, wanted in zip(got.outputs, first.outputs, strict=True):
        ours, theirs = (o.outputs[0].logprobs for o in (output, wanted))
        assert (ours is None) == (theirs is None)
        for mine, other in zip(ours or [], theirs or [], strict=True):
            assert {t: p.rank for t, p in mine.items()} == {t: p.rank for t, p in other.items()}
            for token, value in mine.items():
                assert value.logprob == pytest.approx(other[token].logprob, abs=1e-3)
    if mixed_chains:
        assert got.counters.num_accepted_tokens > 30
        return
    for output, answer in zip(got.outputs[:2], sequences(got), strict=False):
        whole = next(s for s in known if s[: len(answer)] == answer)
        rounds = expected(whole, len(output.prompt_token_ids), plan, len(answer))
        assert output.outputs[0].spec_decode_metrics.per_step_accepted == rounds


def test_an_abort_leaves_the_others_right(text_engine: LLM) -> None:
    """A request leaves in mid-generation, another one takes its states' block."""
    first, _ = plain_text()
    prompts, given = requests()
    engine = text_engine.llm_engine
    text_engine.reset_prefix_cache()
    with known_drafts(text_engine, sequences(first), now_and_then):
        for i in (0, 1, 3, 5):
            engine.add_request(str(i), prompts[i], given[i])
        finished: dict[str, list[int]] = {}
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
            if steps == 6:
                engine.abort_request(["0"])
                engine.add_request("4", prompts[4], given[4])
    for i in (1, 3, 4, 5):
        assert finished[str(i)] == first.token_ids[i]
    assert "0" not in finished or len(finished["0"]) < 40


@pytest.mark.parametrize("caching", [True, False], ids=["aligned", "one block"])
def test_preemption(caching: bool) -> None:
    """Too few blocks for all requests: states are made again from the tokens."""
    prompts = [[3, 5, 7, 9, 2, 4] * 6, [9, 8, 7, 6, 5] * 8, [7] * 40]
    given = [greedy(60), greedy(60, **SEEDED), greedy(50)]
    wanted = run_engine(pair("qwen3_5").target, None, prompts, given, **TOKENS)
    known = [p + t for p, t in zip(prompts, wanted.token_ids, strict=True)]
    with open_engine(
        pair("qwen3_5").target,
        ddtree(pair("qwen3_5"), BUDGET, num_speculative_tokens=DEPTH),
        enable_prefix_caching=caching,
        num_gpu_blocks_override=26 if caching else 18,
        **TOKENS,
    ) as llm:
        with known_drafts(llm, known, now_and_then):
            result = generate(llm, prompts, given)
        preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert result.token_ids == wanted.token_ids
    assert preempted > 0 and result.counters.num_accepted_tokens > 20


@pytest.mark.parametrize("budget", [5, 100])
def test_states_do_not_follow_the_budget(budget: int) -> None:
    """A request has the blocks of plain decoding; the tree of 100 nodes has two blocks of rows."""
    from vllm.v1.kv_cache_interface import MambaSpec

    blocks = []
    for spec in (None, ddtree(pair("qwen3_5"), budget)):
        with open_engine(
            pair("qwen3_5").target, spec, enable_prefix_caching=False, **TOKENS
        ) as llm:
            engine = llm.llm_engine
            core = engine.engine_core.engine_core
            engine.add_request("0", {"prompt_token_ids": SHORT[0]}, greedy(LENGTHS[0]))
            held = []
            while engine.has_unfinished_requests():
                outputs = engine.step()
                manager = core.scheduler.kv_cache_manager
                for request in core.scheduler.requests:
                    ids = manager.get_block_ids(request)
                    groups = manager.kv_cache_config.kv_cache_groups
                    held += [
                        len(of_group)
                        for of_group, group in zip(ids, groups, strict=True)
                        if isinstance(group.kv_cache_spec, MambaSpec)
                    ]
            assert outputs[0].outputs[0].token_ids == plain("qwen3_5").token_ids[0]
            (sizes,) = {
                group.kv_cache_spec.shapes
                for group in manager.kv_cache_config.kv_cache_groups
                if isinstance(group.kv_cache_spec, MambaSpec)
            }
            blocks.append((set(held), sizes))
    assert blocks[0] == blocks[1] and blocks[0][0] == {1}


def test_forms_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps of trees and of chains, as `"budget": "auto"` may choose them."""
    import itertools

    from vllm_ddtree.budget import auto, cost
    from vllm_ddtree.budget.tiers import TIERS
    from vllm_ddtree.proposer.speculator import DDTreeSpeculator

    keep_async(monkeypatch)
    order = itertools.cycle([True, False, False, True, True, False])
    forms: set[bool] = set()
    propose = DDTreeSpeculator.propose

    def measured(worker: Any) -> cost.Costs:
        return cost.Costs(
            {(budget + 1, 8): 1000.0 for budget in TIERS}, {(models.BLOCK_SIZE, 8): 10.0}
        )

    def proposed(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = self.runtime.step
        if step.verified and not step.has_plain_rows:
            forms.add(step.as_chains)
        return propose(self, *args, **kwargs)

    monkeypatch.setattr(cost, "measure", measured)
    monkeypatch.setattr(DDTreeSpeculator, "propose", proposed)
    turn = [next(order)]
    monkeypatch.setattr(auto.AutoBudget, "choice", lambda *_: auto.Choice(7, turn[0]))
    monkeypatch.setattr(auto.Tries, "step", lambda _: turn.__setitem__(0, next(order)))
    chosen = pair("qwen3_5")
    known = [p + t for p, t in zip(SHORT, plain("qwen3_5").token_ids, strict=True)]
    spec = {"method": "ddtree", "model": str(chosen.drafter), "budget": "auto"}
    with (
        open_engine(chosen.target, spec, enable_prefix_caching=False, **TOKENS) as llm,
        known_drafts(llm, known, now_and_then),
    ):
        result = generate(llm, SHORT, params())
    assert result.token_ids == plain("qwen3_5").token_ids
    assert forms == {True, False} and result.counters.num_accepted_tokens > 10


def test_two_ranks() -> None:
    """Heads and their states are split; both ranks hold the same trees."""
    chosen = pair("qwen3_5")
    wanted = plain("qwen3_5").token_ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DDTREE_CHECK", "1")
        with open_engine(
            chosen.target, ddtree(chosen, BUDGET), tensor_parallel_size=2, **TOKENS
        ) as llm:
            llm.collective_rpc(record)
            result = generate(llm, SHORT, params())
            assert rounds(llm) > 5
            for names in llm.collective_rpc(states_of):
                assert names == {((3, 96), (2, 32, 16))}
    assert result.token_ids == wanted
    assert result.counters.num_accepted_tokens > 0


def states_of(worker: Any) -> set[Any]:
    """Shapes of a worker's states (sent to it as a function)."""
    target = worker.model_runner.model_state.recurrent
    return {
        tuple(tuple(state.shape[1:]) for state in layer.kv_cache)
        for layer in target.layers.values()
    }


def test_blocks_smaller_than_a_tree_are_refused() -> None:
    from tests.config.building import refusal

    def start() -> None:
        with open_engine(pair("qwen3_5").target, ddtree(pair("qwen3_5"), 40), **TOKENS):
            pass

    message = refusal(start)
    assert "blocks of 32 tokens and trees of 41 rows" in message
    assert "set --no-enable-prefix-caching" in message
