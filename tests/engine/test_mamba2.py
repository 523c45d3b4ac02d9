# SPDX-License-Identifier: Apache-2.0
"""Targets with Mamba2 layers (Nemotron-H): trees give plain decoding's tokens under what the
scheduler does. What all recurrent layers share is in test_recurrent.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import Pair
from tests.engine import models
from tests.engine.harness import (
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

if TYPE_CHECKING:
    from vllm import LLM

# A round accepts four tokens: in the first four rows, or in four of eight.
BUDGET, DEPTH = 9, 4
BLOCK = 32
ENGINE: dict[str, Any] = {
    "block_size": BLOCK,
    "max_num_seqs": 4,
    "max_model_len": 192,
    "skip_tokenizer_init": True,
}
SEEDED = {"temperature": 0.9, "seed": 21}
PROMPTS = [[3, 5, 7, 9, 2, 4] * 17, [1], [7] * 40, [9, 8, 7, 6, 5] * 14, [2, 4, 6, 3] * 10]
PARAMS: list[tuple[int, dict[str, Any]]] = [
    (30, {}),
    (24, SEEDED),
    (16, {}),
    (28, SEEDED),
    (20, {"presence_penalty": 0.6}),  # a chain
]
FOLDERS = Path()


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    global FOLDERS
    FOLDERS = tmp_path_factory.mktemp("mamba2")
    yield
    pair.cache_clear()
    plain.cache_clear()


@functools.cache
def pair() -> Pair:
    return models.nemotron_h(FOLDERS)


def params(more_tokens: int = 0) -> list[Any]:
    return [greedy(length + more_tokens, **more) for length, more in PARAMS]


@functools.cache
def plain() -> Result:
    """Longer answers than are asked for: what drafts come from goes on."""
    return run_engine(pair().target, None, PROMPTS, params(DEPTH + 1), **ENGINE)


def wanted() -> list[list[int]]:
    lengths = [length for length, _ in PARAMS]
    return [tokens[:n] for tokens, n in zip(plain().token_ids, lengths, strict=True)]


def known() -> list[list[int]]:
    return [prompt + tokens for prompt, tokens in zip(PROMPTS, plain().token_ids, strict=True)]


def drafts(plan: Plan) -> dict[tuple[int, ...], list[int]]:
    """The drafter's best tokens after every sequence, while trees hold what `plan` says."""
    from vllm_ddtree.proposer.speculator import DDTreeSpeculator

    found: dict[tuple[int, ...], list[int]] = {}
    build, sequences = DDTreeSpeculator.build_plain, known()
    spec = ddtree(pair(), BUDGET, num_speculative_tokens=DEPTH)
    with pytest.MonkeyPatch.context() as patch, open_engine(pair().target, spec, **ENGINE) as llm:
        states = model_runner(llm).req_states

        def noted(self: Any, num_reqs: int, log_probs: Any, token_ids: Any) -> None:
            indices = self.sample_idx_mapping[: num_reqs * self.num_speculative_steps]
            for i, index in enumerate(indices.view(num_reqs, -1)[:, 0].tolist()):
                if index >= 0:
                    length = int(states.total_len.gpu[index])
                    tokens = tuple(states.all_token_ids.gpu[index, :length].tolist())
                    found[tokens] = token_ids[i, :, 0].tolist()
            build(self, num_reqs, log_probs, token_ids)

        patch.setattr(DDTreeSpeculator, "build_plain", noted)
        with known_drafts(llm, sequences, plan):
            assert generate(llm, PROMPTS, params()).token_ids == wanted()
    return found


def test_the_drafter_reads_the_accepted_paths() -> None:
    """It drafts what it drafts where nothing is ever accepted, one token a round."""
    one_by_one, by_paths = drafts(lambda _: None), drafts(sibling)
    common = one_by_one.keys() & by_paths.keys()
    # A path may lead beyond a request's end.
    assert 0.8 * len(by_paths) < len(common) < len(one_by_one) / 2
    for tokens in common:
        assert by_paths[tokens] == one_by_one[tokens]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    """Asynchronous scheduling, chunks of long prompts beside trees, prefix caching, all checks."""
    plain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DDTREE_CHECK", "1")
        keep_async(patch)
        with open_engine(
            pair().target,
            # Else vLLM leaves out the last block of a hit, for the drafter's sake.
            ddtree(pair(), BUDGET, num_speculative_tokens=DEPTH, disable_eagle_block_drop=True),
            enable_prefix_caching=True,
            # Else vLLM keeps states at the prompt's end alone.
            prefix_cache_retention_interval=2 * BLOCK,
            max_num_batched_tokens=80,
            **ENGINE,
        ) as llm:
            yield llm


@pytest.mark.parametrize(
    ("plan", "mixed_chains"),
    [(on_chain, False), (sibling, False), (now_and_then, False), (sibling, True)],
)
def test_tokens_are_those_of_plain_decoding(
    engine: LLM, plan: Plan, mixed_chains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts that are right, first without and then with prefix hits."""
    state = model_runner(engine).model_state
    monkeypatch.setattr(state, "_mixed_tree_tokens", float("inf") if mixed_chains else 0)
    engine.reset_prefix_cache()
    with known_drafts(engine, known(), plan):
        first = generate(engine, PROMPTS, params())
        hits = generate(engine, PROMPTS, params())
    assert first.token_ids == hits.token_ids == wanted()
    assert [output.num_cached_tokens for output in hits.outputs] == [64, 0, 0, 64, 0]
    assert first.counters.num_accepted_tokens > 30


def test_preemption() -> None:
    """Too few blocks for all requests: states are made again from the tokens."""
    with open_engine(
        pair().target,
        ddtree(pair(), BUDGET, num_speculative_tokens=DEPTH),
        enable_prefix_caching=False,
        num_gpu_blocks_override=20,
        **ENGINE,
    ) as llm:
        with known_drafts(llm, known(), now_and_then):
            result = generate(llm, PROMPTS, params())
        preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert result.token_ids == wanted()
    assert preempted > 0 and result.counters.num_accepted_tokens > 20


def test_trees_of_two_blocks_of_rows() -> None:
    result = run_engine(
        pair().target,
        ddtree(pair(), 100),
        PROMPTS,
        params(),
        enable_prefix_caching=False,
        **ENGINE,
    )
    assert result.token_ids == wanted()
    assert result.counters.num_accepted_tokens > 0


def test_two_ranks() -> None:
    """Heads, groups and their states are split; both ranks hold the same trees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DDTREE_CHECK", "1")
        with open_engine(
            pair().target, ddtree(pair(), BUDGET), tensor_parallel_size=2, **ENGINE
        ) as llm:
            llm.collective_rpc(record)
            result = generate(llm, PROMPTS[:3], params()[:3])
            assert rounds(llm) > 5
    assert result.token_ids == wanted()[:3]
    assert result.counters.num_accepted_tokens > 0
