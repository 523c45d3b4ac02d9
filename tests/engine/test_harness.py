# SPDX-License-Identifier: Apache-2.0
"""The harness serves, counts and cleans up right, on vLLM's own plain decoding and DFlash chain."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, ddtree, dflash, generate, greedy, open_engine, run_engine
from tests.engine.known import model_runner


@pytest.fixture(scope="module")
def plain(nano_pair: Pair):
    return run_engine(nano_pair.target, None, PROMPTS, greedy(32))


def test_plain_engine_drafts_nothing(plain) -> None:
    assert [len(tokens) for tokens in plain.token_ids] == [32] * len(PROMPTS)
    assert plain.counters.num_drafts == plain.counters.num_accepted_tokens == 0
    assert plain.counters.acceptance_length == 1.0


@pytest.mark.parametrize("depth", [3, 7])
def test_chain_engine_after_a_plain_one(nano_pair: Pair, plain, depth: int) -> None:
    chain = run_engine(nano_pair.target, dflash(nano_pair, depth), PROMPTS, greedy(32))
    assert chain.token_ids == plain.token_ids
    counters = chain.counters
    assert counters.num_draft_tokens <= depth * counters.num_drafts
    assert len(counters.per_position) == depth
    assert sum(counters.per_position) == counters.num_accepted_tokens > 0
    # Every round gives its accepted tokens and one more; the last may be cut at max_tokens.
    decoded = sum(map(len, chain.token_ids)) - len(PROMPTS)
    assert decoded <= counters.num_accepted_tokens + counters.num_drafts


def test_counters_are_those_of_one_call(nano_pair: Pair) -> None:
    with open_engine(nano_pair.target, dflash(nano_pair), enable_prefix_caching=False) as llm:
        first = generate(llm, PROMPTS[:2], greedy(24))
        second = generate(llm, PROMPTS[:2], greedy(24))
        progress: list[int] = []
        stepped = generate(llm, PROMPTS[:2], greedy(24), on_tokens=progress.append)
    assert first.counters == second.counters == stepped.counters
    assert first.token_ids == second.token_ids == stepped.token_ids
    assert sum(progress) == 48 and len(progress) > 2


def test_an_engine_starts_after_one_that_failed_to(nano_pair: Pair, plain) -> None:
    with pytest.raises(Exception, match=r"num_speculative_tokens|method"):
        run_engine(nano_pair.target, {"method": "no-such-method"}, PROMPTS, greedy(4))
    again = run_engine(nano_pair.target, None, PROMPTS, greedy(32))
    assert again.token_ids == plain.token_ids


def test_an_engine_is_gone_after_its_end(nano_pair: Pair, plain) -> None:
    """Also where the modules, frozen before, are not looked through for garbage."""
    for spec in (None, ddtree(nano_pair, 7)):
        with open_engine(nano_pair.target, spec) as llm:
            assert len(gc.get_objects()) < gc.get_freeze_count()
            runner = weakref.ref(model_runner(llm))
            assert runner() is not None
        del llm
        gc.collect()
        assert runner() is None


def test_a_sampling_params_a_prompt(nano_pair: Pair, plain) -> None:
    lengths = [3, 5, 8]
    result = run_engine(nano_pair.target, None, PROMPTS[:3], [greedy(n) for n in lengths])
    expected = [tokens[:n] for tokens, n in zip(plain.token_ids, lengths, strict=False)]
    assert result.token_ids == expected
