# SPDX-License-Identifier: Apache-2.0
"""An engine with `VLLM_DDTREE_CHECK=1`: silent when all is right; a request for which something is
not right ends with an error, and that request alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import NANO
from tests.engine.harness import (
    PROMPTS,
    Result,
    ddtree,
    generate,
    greedy,
    keep_async,
    open_engine,
)
from tests.engine.known import model_runner

if TYPE_CHECKING:
    from vllm import LLM

# A small cache: the checks read all of it.
ENGINE: dict[str, Any] = {
    "max_num_seqs": 3,
    "block_size": 32,
    "kv_cache_memory_bytes": 4 << 20,
    "max_model_len": 256,
}
LENGTHS = [4, 12, 11, 9]
# The second verifies a chain inside the tree's rows.
PARAMS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 0.5},
    {"temperature": 0.8, "seed": 5},
    {"logprobs": 1},
]
QUERIES = [PROMPTS[0], PROMPTS[1], PROMPTS[5], PROMPTS[3]]
BAD = 2
"""The request that tests break: its prompt fills KV blocks, which the prefix cache keeps."""


def run(llm: LLM) -> Result:
    """Three slots for four requests: a prefill shares a step with trees."""
    params = [greedy(n, **more) for n, more in zip(LENGTHS, PARAMS, strict=True)]
    return generate(llm, QUERIES, params)


@pytest.fixture(scope="module")
def plain() -> Result:
    with open_engine(NANO.target, **ENGINE) as llm:
        return run(llm)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, plain: Result) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            keep_async(patch)
        patch.setenv("VLLM_DDTREE_CHECK", "1")
        with open_engine(NANO.target, ddtree(NANO, 15), **ENGINE) as llm:
            assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == request.param
            yield llm


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """Error lines of the engine's log."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.ERROR)
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.mark.parametrize("mixed_tree_tokens", [0, 1024], ids=["trees", "chains"])
def test_a_right_engine(
    engine: LLM,
    plain: Result,
    errors: list[str],
    monkeypatch: pytest.MonkeyPatch,
    mixed_tree_tokens: int,
) -> None:
    from vllm_ddtree.invariants import checks

    steps = []
    check_step = checks.check_step

    def counted(runtime: Any, *args: Any) -> Any:
        steps.append(runtime.step.as_chains)
        return check_step(runtime, *args)

    monkeypatch.setattr(checks, "check_step", counted)
    state = model_runner(engine).model_state
    monkeypatch.setattr(state, "_mixed_tree_tokens", mixed_tree_tokens)
    result = run(engine)
    assert len(steps) > 5 and any(steps) == bool(mixed_tree_tokens)
    assert result.token_ids == plain.token_ids
    assert result.counters.num_accepted_tokens > 0
    assert not errors


def test_metadata_are_the_targets_alone(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the drafter's layers nothing is prepared before the target runs."""
    from vllm_ddtree.model_state import DDTreeModelState

    prepare_attn, seen = DDTreeModelState.prepare_attn, []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = prepare_attn(self, *args, **kwargs)
        seen.append(set(metadata))
        return metadata

    monkeypatch.setattr(DDTreeModelState, "prepare_attn", watched)
    run(engine)
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    assert len(seen) > 5 and any(layer.is_draft_layer for layer in layers.values())
    targets = {name for name, layer in layers.items() if not layer.is_draft_layer}
    assert all(names == targets for names in seen)


class Bad:
    """The request that is broken; vLLM's workers know it by the user's id and a suffix."""

    prefix = ""

    @classmethod
    def has(cls, req_id: str) -> bool:
        return req_id.startswith(cls.prefix)


def sees_a_sibling(patch: pytest.MonkeyPatch) -> None:
    """The last row of the request's tree sees every row."""
    from vllm_ddtree.model_state import DDTreeModelState

    prepare_inputs = DDTreeModelState.prepare_inputs

    def corrupted(self: Any, batch: Any, *args: Any) -> Any:
        rows = self.runtime.rows
        for i, name in enumerate(batch.req_ids):
            if Bad.has(name) and int(rows.tail_lens[i]) > 2:
                rows.masks[int(batch.query_start_loc[i + 1]) - 1, 0] = -1
        return prepare_inputs(self, batch, *args)

    patch.setattr(DDTreeModelState, "prepare_inputs", corrupted)


def writes_a_free_slot(patch: pytest.MonkeyPatch) -> None:
    """The commit also writes to the request's first token."""
    from vllm_ddtree.commit.kv import KVCompactor
    from vllm_ddtree.model_state import DDTreeModelState

    compact, prepare_attn = KVCompactor.compact, DDTreeModelState.prepare_attn
    first: list[int] = []

    def note(self: Any, batch: Any, mode: Any, tables: Any, *args: Any, **more: Any) -> Any:
        first[:] = [int(tables[0][i, 0]) for i, name in enumerate(batch.req_ids) if Bad.has(name)]
        return prepare_attn(self, batch, mode, tables, *args, **more)

    def corrupted(self: Any, *args: Any) -> None:
        compact(self, *args)
        for block in first:
            self.caches[0][block, 0, 0] += 9

    patch.setattr(DDTreeModelState, "prepare_attn", note)
    patch.setattr(KVCompactor, "compact", corrupted)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (sees_a_sibling, "a row sees itself and its ancestors: row 15 sees [0, 1, 2,"),
        (writes_a_free_slot, "free slots are never written: KV group 0, cache 0: slots ["),
    ],
)
def test_a_broken_request_is_stopped_alone(
    engine: LLM,
    plain: Result,
    errors: list[str],
    monkeypatch: pytest.MonkeyPatch,
    corrupt: Any,
    message: str,
) -> None:
    pool = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    # LLM numbers its requests.
    monkeypatch.setattr(Bad, "prefix", f"{engine.request_counter.counter + BAD}-")
    with monkeypatch.context() as patch:
        corrupt(patch)
        result = run(engine)
    for i, (expected, output) in enumerate(zip(plain.outputs, result.outputs, strict=True)):
        tokens = list(output.outputs[0].token_ids)
        if i == BAD:
            assert output.finished and output.outputs[0].finish_reason == "error"
            assert output.outputs[0].stop_reason.startswith(f"ddtree invariant broken: {message}")
            # What came before is right.
            assert len(tokens) < LENGTHS[BAD] and tokens == plain.token_ids[i][: len(tokens)]
        else:
            assert tokens == plain.token_ids[i] and output.outputs[0].finish_reason == "length"
            assert output.outputs[0].text == expected.outputs[0].text
    assert len(errors) == 1
    assert f"Request {Bad.prefix}" in errors[0] and message in errors[0]
    assert pool.get_num_free_blocks() == free
    # The engine serves on, and its prefix cache holds nothing of the broken request.
    assert run(engine).token_ids == plain.token_ids
    assert len(errors) == 1


def test_an_engine_that_moves_nothing(
    engine: LLM, plain: Result, errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_ddtree.commit.kv import KVCompactor

    with monkeypatch.context() as patch:
        patch.setattr(KVCompactor, "compact", lambda *args: None)
        result = run(engine)
    reasons = [output.outputs[0].finish_reason for output in result.outputs]
    assert reasons.count("error") == len(errors) > 0
    assert all("accepted rows = compacted rows: KV group 0" in line for line in errors)
    # The chain's rows lie in place.
    assert reasons[1] == "length" and result.token_ids[1] == plain.token_ids[1]
