# SPDX-License-Identifier: Apache-2.0
"""Targets with a vision tower and positions of several axes: prompts of text and of images.

Tokens are those of plain decoding; every row of every step stands where a reference says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from tests.conftest import Pair
from tests.engine import vision
from tests.engine.harness import ddtree, dflash, generate, greedy, keep_async, open_engine
from tests.engine.known import known_drafts, model_runner, on_chain, sibling
from vllm_ddtree.round import plan as step_plan
from vllm_ddtree.testing.engine import Result

if TYPE_CHECKING:
    from vllm import LLM

    from tests.engine.known import Plan

# A round accepts four tokens: in the first four rows, or in four of eight.
BUDGET, DEPTH = 9, 4
# Steps of 60 tokens: chunks of the prompts end inside images, beside trees.
ENGINE: dict[str, Any] = {
    "block_size": 32,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 60,
    "max_model_len": 256,
    "limit_mm_per_prompt": {"image": 3, "video": 0},
    "mm_encoder_attn_backend": "TORCH_SDPA",
}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}
PROMPTS = {
    "words": vision.Prompt((vision.text(40),)),
    "one word": vision.Prompt((vision.text(1, 1),)),
    "wide": vision.Prompt((vision.text(7, 2), vision.image(0, 4, 8), vision.text(5, 3))),
    "two": vision.Prompt(
        (
            vision.image(1, 7, 7),
            vision.text(9, 4),
            vision.image(2, 3, 2),
            vision.text(30, 5),
        )
    ),
    "seeded": vision.Prompt((vision.image(1, 7, 7), vision.text(9, 4), vision.image(3, 5, 2))),
    "ends in an image": vision.Prompt((vision.text(6, 6), vision.image(4, 5, 7)), True),
}
LENGTHS = [14, 11, 20, 13, 16, 18]
PARAMS: list[dict[str, Any]] = [{}, SEEDED, {}, {}, SEEDED, SEEDED]


def ask(llm: LLM, more_tokens: int = 0) -> Result:
    """All prompts at once."""
    params = [
        greedy(length + more_tokens, detokenize=False, **more)
        for length, more in zip(LENGTHS, PARAMS, strict=True)
    ]
    return generate(llm, [prompt.request for prompt in PROMPTS.values()], params)


class Plain(NamedTuple):
    """A pair, and what its target says without speculation."""

    pair: Pair
    tokens: list[list[int]]
    sequences: list[list[int]]
    """Prompts and continuations, longer than the tokens."""


@pytest.fixture(scope="module", params=[vision.qwen3_vl, vision.qwen2_5_vl, vision.qwen3_5])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    make: Callable[[Path], Pair] = request.param
    pair = make(tmp_path_factory.mktemp(make.__name__))
    with vision.processors(), open_engine(pair.target, None, **ENGINE) as llm:
        result = ask(llm, DEPTH + 1)
    for prompt, output in zip(PROMPTS.values(), result.outputs, strict=True):
        assert output.prompt_token_ids == prompt.token_ids
    return Plain(
        pair,
        [tokens[:length] for tokens, length in zip(result.token_ids, LENGTHS, strict=True)],
        [
            [*prompt.token_ids, *tokens]
            for prompt, tokens in zip(PROMPTS.values(), result.token_ids, strict=True)
        ],
    )


@pytest.fixture(scope="module")
def engine(plain: Plain) -> Iterator[LLM]:
    """With trees, asynchronous scheduling and checks."""
    with pytest.MonkeyPatch.context() as patch, vision.processors():
        keep_async(patch)
        patch.setenv("VLLM_DDTREE_CHECK", "1")
        # Mixed steps of a small model would verify chains.
        patch.setattr(step_plan, "MIXED_TREE_TOKENS", 0)
        spec = ddtree(plain.pair, BUDGET, num_speculative_tokens=DEPTH)
        more = {"per_request_spec_decode_metrics": "detailed"}
        with open_engine(plain.pair.target, spec, **more, **ENGINE) as llm:
            yield llm


class Seen:
    """What the rows of an engine's steps were."""

    def __init__(self) -> None:
        self.off_chain = 0
        """Nodes that stand elsewhere than in a chain."""
        self.in_images = 0
        """Rows with different positions on different axes."""
        self.moved = 0
        """Tree rows that stand elsewhere than their linear position."""
        self.mixed = 0
        """Steps with trees and rows of prompts."""
        self.chunks_in_images = 0
        """Chunks of prompts that end inside an image."""

    def check(self, state: Any, batch: Any, states: Any, positions: torch.Tensor) -> None:
        """Compare the target's positions with the reference."""
        trees = state.runtime.trees
        indices = batch.idx_mapping.tolist()
        starts, logits = batch.query_start_loc.tolist(), batch.cu_num_logits.tolist()
        counts = [end - start for start, end in itertools.pairwise(logits)]
        self.mixed += max(counts) > 1 and counts != batch.num_scheduled_tokens.tolist()
        for i, index in enumerate(indices):
            tokens = states.all_token_ids.gpu[index, : int(states.total_len.gpu[index])].tolist()
            prompt = max(
                (p for p in PROMPTS.values() if tokens[: len(p.token_ids)] == p.token_ids),
                key=lambda p: len(p.token_ids),
            )
            num_rows, first = starts[i + 1] - starts[i], int(states.num_computed_tokens.gpu[index])
            root = num_rows - counts[i] if counts[i] > 1 else num_rows
            depths = trees.depths[index, : num_rows - root].tolist()
            places = [first + row for row in range(root)]
            places += [first + root + depth for depth in depths]
            expected = prompt.positions(max(places) + 1)
            got = positions[:, starts[i] : starts[i + 1]].T.tolist()
            assert got == [list(expected[place]) for place in places]
            self.off_chain += sum(depth != row for row, depth in enumerate(depths))
            self.in_images += sum(len(set(expected[place])) > 1 for place in places)
            self.moved += sum(expected[place][0] != place for place in places[root:])
            after = prompt.token_ids[first + num_rows :][:1]
            self.chunks_in_images += after == [vision.IMAGE] == tokens[first + num_rows - 1 :][:1]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The rows of all steps from now on, each checked."""
    from vllm_ddtree.model_state import DDTreeModelState

    seen, prepare = Seen(), DDTreeModelState.prepare_inputs

    def checked(self: Any, batch: Any, states: Any) -> dict[str, Any]:
        inputs = prepare(self, batch, states)
        seen.check(self, batch, states, inputs["positions"])
        return inputs

    monkeypatch.setattr(DDTreeModelState, "prepare_inputs", checked)
    return seen


@pytest.mark.parametrize("plan", [sibling, on_chain])
def test_tokens_and_positions(engine: LLM, plain: Plain, seen: Seen, plan: Plan) -> None:
    """Rounds accept the whole depth, except where chunks of a prompt leave trees less room."""
    assert engine.reset_prefix_cache()
    with known_drafts(engine, plain.sequences, plan):
        result = ask(engine)
    assert result.token_ids == plain.tokens
    assert result.counters.acceptance_length > 0.7 * (DEPTH + 1)
    assert seen.mixed > 3 and seen.chunks_in_images > 1
    assert seen.in_images > 100 and seen.moved > 100
    if plan is sibling:
        assert seen.off_chain > 50


def test_the_drafters_own_words(engine: LLM, plain: Plain, seen: Seen) -> None:
    """The trees of the random drafter: most of what they hold is wrong."""
    result = ask(engine)
    assert result.token_ids == plain.tokens
    assert 0 < result.counters.num_accepted_tokens < 0.2 * result.counters.num_draft_tokens
    assert seen.off_chain > 100


def test_prefixes_with_images_are_found(engine: LLM, plain: Plain, seen: Seen) -> None:
    for _ in range(2):
        before = seen.in_images
        result = ask(engine)
        assert result.token_ids == plain.tokens
    cached = [output.num_cached_tokens for output in result.outputs]
    if plain.pair.name.startswith("qwen3_5"):
        # Of recurrent states vLLM keeps those at a prompt's last block alone, which is left out.
        assert cached == [0] * 6
        return
    # Whole blocks, but the last: the drafter reads the target's states there (vLLM's rule).
    assert cached == [0, 0, 0, 64, 32, 0]
    assert 0 < seen.in_images - before < 150


def drafts(pair: Pair, spec: dict[str, Any]) -> dict[tuple[int, ...], list[int]]:
    """What is drafted after every sequence of tokens, with greedy requests."""
    found: dict[tuple[int, ...], list[int]] = {}
    with vision.processors(), open_engine(pair.target, spec, **ENGINE) as llm:
        runner = model_runner(llm)
        states, propose = runner.req_states, runner.speculator.propose

        def noted(batch: Any, *args: Any, **more: Any) -> torch.Tensor:
            tokens = propose(batch, *args, **more)
            for index, draft in zip(batch.idx_mapping.tolist(), tokens.tolist(), strict=False):
                length = int(states.total_len.gpu[index])
                found[tuple(states.all_token_ids.gpu[index, :length].tolist())] = draft
            return tokens

        runner.speculator.propose = noted
        requests = [prompt.request for prompt in PROMPTS.values()]
        generate(llm, requests, greedy(12, detokenize=False))
    return found


@pytest.mark.parametrize("plain", [vision.qwen3_vl], indirect=True)
def test_drafts_are_those_of_vllms_chain(plain: Plain) -> None:
    """A tree of one candidate a position is vLLM's chain: the drafter's positions and context are
    vLLM's, behind images too."""
    theirs = drafts(plain.pair, dflash(plain.pair))
    ours = drafts(plain.pair, ddtree(plain.pair, plain.pair.block_size - 1, top_k=1))
    assert len(ours) > 40
    assert ours == theirs


@pytest.mark.parametrize("plain", [vision.qwen3_vl], indirect=True)
def test_preemption(plain: Plain, seen: Seen) -> None:
    """Eleven KV blocks for four requests: those that are resumed are prompts again, images and
    all, with what they have said so far."""
    spec = ddtree(plain.pair, BUDGET, num_speculative_tokens=DEPTH)
    small = {**ENGINE, "num_gpu_blocks_override": 11}
    with vision.processors(), open_engine(plain.pair.target, spec, **small) as llm:
        with known_drafts(llm, plain.sequences, sibling):
            result = ask(llm)
        preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert result.token_ids == plain.tokens
    assert preempted > 0
    assert seen.moved > 100
