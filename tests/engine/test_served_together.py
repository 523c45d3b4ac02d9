# SPDX-License-Identifier: Apache-2.0
"""What an engine is started with works together with trees, in one engine a case.

Grammars of guidance and outlines, priorities and preemption, logits processors of the user's, modes
of logprobs, a drafter of shorter length.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

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

if TYPE_CHECKING:
    from vllm import LLM

SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 4}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["list", "dict"]}, "ok": {"type": "boolean"}},
    "required": ["kind", "ok"],
    "additionalProperties": False,
}


def structured(**what: Any) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**what), "ignore_eos": False}


def preemptions(llm: LLM) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def test_guidance_and_processed_logprobs(nano_pair: Pair) -> None:
    keys: dict[str, Any] = {
        "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": 6,
    }
    cut = {"temperature": 0.7, "seed": 2, "top_k": 6, "top_p": 0.9}
    params = [
        greedy(30, **structured(json=SCHEMA)),
        greedy(12, **structured(regex=r"[a-c]{4}=[0-9]{3}"), **SEEDED),
        greedy(12, **structured(grammar='start: "SELECT " ("a" | "b")')),
        greedy(6, logprobs=8, frequency_penalty=1.0, **cut),
        greedy(6, logprobs=8, **cut),
    ]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[3], PROMPTS[3]]
    expected = run_engine(nano_pair.target, None, prompts, params, **keys)
    got = run_engine(nano_pair.target, ddtree(nano_pair, 9), prompts, params, **keys)
    assert got.token_ids == expected.token_ids
    assert set(json.loads(got.texts[0])) == {"kind", "ok"}
    assert re.fullmatch(r"[a-c]{4}=[0-9]{3}", got.texts[1])
    assert re.fullmatch(r"SELECT [ab]", got.texts[2])
    minus_infinity = 0
    for a, b in zip(expected.outputs[3:], got.outputs[3:], strict=True):
        for x, y in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
            # What top_k cut away ties at -inf: which of it stands there means nothing.
            x = {token: entry.logprob for token, entry in x.items()}
            y = {token: entry.logprob for token, entry in y.items()}
            minus_infinity += sum(value == -float("inf") for value in y.values())
            x, y = ({t: v for t, v in e.items() if v > -float("inf")} for e in (x, y))
            assert 0 < len(y) <= 6 and y == pytest.approx(x, abs=1e-3)
    assert minus_infinity > 0


PATTERN = r"[a-z ]{20,24}=[0-9]{3}"


@functools.cache
def unhurried(pair: Pair) -> Result:
    """Without speculation and with room for all."""
    return run_engine(pair.target, None, *three(), block_size=32)


def three() -> tuple[list[str], list[Any]]:
    prompts = [PROMPTS[5], PROMPTS[5] + " x", PROMPTS[5] + "\n"]
    params = [
        greedy(34, **structured(regex=PATTERN)),
        greedy(24, presence_penalty=0.5, **SEEDED),
        greedy(8),
    ]
    return prompts, params


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_priorities_preempt_and_grammars_resume(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Nine KV blocks: the least urgent request is preempted, the most urgent one goes before it,
    and its grammar goes on where it was.
    """
    keys: dict[str, Any] = {
        "block_size": 32,
        "num_gpu_blocks_override": 9,
        "max_model_len": 200,
        "enable_prefix_caching": False,
        "scheduling_policy": "priority",
        "max_num_seqs": 4,
    }
    expected, (prompts, params) = unhurried(nano_pair), three()
    if asynchronous:
        keep_async(monkeypatch)
    with open_engine(nano_pair.target, ddtree(nano_pair, 9), **keys) as llm:
        engine = llm.llm_engine
        assert engine.vllm_config.scheduler_config.async_scheduling == asynchronous
        for i in (0, 1):
            engine.add_request(str(i), prompts[i], params[i], priority=5 - i)
        finished: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output.outputs[0]
            steps += 1
            if steps == 3:
                engine.add_request("2", prompts[2], params[2], priority=0)
        preempted = preemptions(llm)
    assert preempted > 0
    order = list(finished)
    assert order.index("2") < order.index("0")  # the urgent one, which came last, went before
    assert [list(finished[str(i)].token_ids) for i in range(3)] == expected.token_ids
    assert re.fullmatch(PATTERN, finished["0"].text)


class NoRepeat(LogitsProcessor):
    """Forbids the token that came two tokens before: it depends on the branch, not on the row."""

    changed = 0

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.states = req_states

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        for row in range(logits.shape[0]):
            slot = int(ctx.expanded_idx_mapping[row])
            position = int(ctx.expanded_local_pos[row])
            if position > 0:  # the row before it holds the token before its own
                before = int(ctx.input_ids[row - 1])
            else:
                length = int(self.states.total_len.gpu[slot])
                before = int(self.states.all_token_ids.gpu[slot, length - 2])
            NoRepeat.changed += int(logits[row].argmax()) == before
            logits[row, before] = -float("inf")
        return logits


def values(entries: Any) -> list[dict[int, float]]:
    return [{token: x.logprob for token, x in (entry or {}).items()} for entry in entries]


def same_logprobs(expected: Any, got: Any) -> None:
    """Of the tokens and, where asked for, of the prompts."""
    for a, b in zip(expected, got, strict=True):
        pairs = [(a.outputs[0].logprobs, b.outputs[0].logprobs)]
        pairs += [(a.prompt_logprobs, b.prompt_logprobs)] if a.prompt_logprobs else []
        for x, y in pairs:
            for theirs, mine in zip(values(x), values(y), strict=True):
                assert mine == pytest.approx(theirs, abs=1e-3)


def test_logits_processors_of_the_users(nano_pair: Pair) -> None:
    """They get chains: rows before a row are the tokens before its token. The logits that they
    leave are what a client of the mode processed_logits sees.
    """
    keys: dict[str, Any] = {
        "logits_processors": [NoRepeat],
        "max_num_seqs": 4,
        "logprobs_mode": "processed_logits",
    }
    prompts = [PROMPTS[0], PROMPTS[3]]
    params = [greedy(14, logprobs=3), greedy(14, logprobs=3, **SEEDED)]
    expected = run_engine(nano_pair.target, None, prompts, params, **keys)
    got = run_engine(nano_pair.target, ddtree(nano_pair, 15), prompts, params, **keys)
    assert NoRepeat.changed > 0  # without it the text would be another
    for tokens in got.token_ids:
        assert all(a != b for a, b in zip(tokens, tokens[2:], strict=False))
    assert got.token_ids == expected.token_ids
    assert got.counters.num_accepted_tokens > 0
    same_logprobs(expected.outputs, got.outputs)
    assert (
        max(v for entry in values(got.outputs[0].outputs[0].logprobs) for v in entry.values()) > 0
    )


def test_beams_and_one_slot(nano_pair: Pair) -> None:
    """Beam search (one-token requests with logprobs) and a queue behind a single slot."""
    from vllm.sampling_params import BeamSearchParams

    def run(spec: dict[str, Any] | None) -> tuple[Any, Any, Any]:
        with open_engine(nano_pair.target, spec, max_num_seqs=1) as llm:
            queue = generate(llm, PROMPTS[:3], [greedy(7), greedy(7, **SEEDED), greedy(1)])
            beams = llm.beam_search(
                [{"prompt": PROMPTS[0]}], BeamSearchParams(beam_width=2, max_tokens=3)
            )
            stops = generate(llm, PROMPTS[:1], greedy(7, ignore_eos=False))
        found = [(beam.tokens, beam.cum_logprob) for beam in beams[0].sequences]
        return queue.token_ids, found, stops.token_ids

    expected, got = run(None), run(ddtree(nano_pair, 9))
    assert got[0] == expected[0] and got[2] == expected[2]
    assert [tokens for tokens, _ in got[1]] == [tokens for tokens, _ in expected[1]]
    for (_, a), (_, b) in zip(expected[1], got[1], strict=True):
        assert a == pytest.approx(b, abs=1e-3)


def prompt_of_one_token(llm: LLM) -> list[Any]:
    """Prompt logprobs (no token precedes the first) and tokens of a request that comes beside a
    running one, whose rows vLLM gives it, too.
    """
    engine = llm.llm_engine
    engine.add_request("running", PROMPTS[0], greedy(40))
    for _ in range(2):
        engine.step()
    engine.add_request("late", PROMPTS[1], greedy(6, prompt_logprobs=2))
    beside, found = False, []
    while engine.has_unfinished_requests():
        outputs = {output.request_id: output for output in engine.step()}
        beside |= outputs.keys() == {"running", "late"}
        if "late" in outputs:
            found = [outputs["late"].prompt_logprobs, list(outputs["late"].outputs[0].token_ids)]
    assert beside
    return found


def test_a_drafter_of_shorter_length(nano_pair: Pair) -> None:
    """`max_model_len` of the drafter below the target's: the text goes on beyond it.

    In the same engine: raw logits instead of logprobs, scores of given tokens at every row of a
    prompt, a grammar of outlines, and a late prompt of one token.
    """
    from transformers import AutoTokenizer

    keys: dict[str, Any] = {
        "logprobs_mode": "raw_logits",
        "structured_outputs_config": {"backend": "outlines"},
    }
    rows = len(AutoTokenizer.from_pretrained(str(nano_pair.target))(PROMPTS[3]).input_ids) - 1
    given = [[row, 2 * row + 1] for row in range(rows)]
    prompts = [PROMPTS[5], PROMPTS[0], PROMPTS[3], PROMPTS[2]]
    params = [
        greedy(16, logprobs=2, prompt_logprobs=1),
        greedy(12, logprobs=2, frequency_penalty=1.0, **SEEDED),
        greedy(6, prompt_logprob_token_ids=given),
        greedy(12, **structured(regex=r"[a-c]{4}=[0-9]{3}"), **SEEDED),
    ]

    def run(spec: dict[str, Any] | None) -> tuple[Result, list[Any]]:
        with open_engine(nano_pair.target, spec, **keys) as llm:
            return generate(llm, prompts, params), prompt_of_one_token(llm)

    expected, late = run(None)
    got, late_got = run(ddtree(nano_pair, 9, max_model_len=108))  # the first prompt has 101 tokens
    assert got.token_ids == expected.token_ids
    assert late_got == late and late[0] == [None]
    same_logprobs(expected.outputs[:2], got.outputs[:2])
    assert (
        max(v for entry in values(got.outputs[0].outputs[0].logprobs) for v in entry.values()) > 0
    )
    scores = [result.outputs[2].prompt_token_id_logprobs for result in (expected, got)]
    assert scores[1].shape == (rows, 2)
    torch.testing.assert_close(scores[1], scores[0], atol=1e-3, rtol=0)
    assert re.fullmatch(r"[a-c]{4}=[0-9]{3}", got.texts[3])


def test_what_the_cpu_has_not_is_said(nano_pair: Pair) -> None:
    """vLLM refuses sleep mode on the CPU by itself; with a GPU it is not refused."""
    with (
        pytest.raises(ValueError, match=r"[Ss]leep mode"),
        open_engine(nano_pair.target, ddtree(nano_pair, 4), enable_sleep_mode=True),
    ):
        pass
