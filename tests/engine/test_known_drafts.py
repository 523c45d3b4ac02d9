# SPDX-License-Identifier: Apache-2.0
"""Whatever a client asks, the answer is that of plain decoding under drafts that are right.

Everything that ends, cuts or constrains a request then happens inside an accepted path, in the
rows' own order or skipping some of them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.conftest import NANO
from tests.engine.harness import PROMPTS, ddtree, generate, greedy, open_engine
from tests.engine.known import Plan, known_drafts, model_runner, now_and_then, on_chain, sibling
from vllm_ddtree.sampler.chain_requests import needs_chain

if TYPE_CHECKING:
    from vllm import LLM

# A round accepts four tokens: in the first four rows, or in four of eight.
BUDGET, DEPTH = 9, 4
MAX_MODEL_LEN = 124
LENGTH = 11
ENGINE: dict[str, Any] = {
    "block_size": 32,
    "max_num_seqs": 10,
    "max_num_batched_tokens": 1024,
    "max_model_len": MAX_MODEL_LEN,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    # Two of nano's tokens that it never writes by itself.
    "reasoning_config": {
        "reasoning_start_str": "<|user|>",
        "reasoning_end_str": "<|assistant|>",
    },
}
THINK, ANSWER = 2, 3
SAMPLED = {"temperature": 0.9, "seed": 21}
REGEX = r"[a-c]{4}=[0-9]{3}"
CHOICES = ["alpha", "beta", "gamma_ray"]
GRAMMAR = 'root ::= "SELECT " column " FROM " column\ncolumn ::= "col_1" | "col_2"'
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["list", "dict"]}, "ok": {"type": "boolean"}},
    "required": ["kind", "ok"],
    "additionalProperties": False,
}

# Text, then a call whose arguments follow the schema.
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "regex", "pattern": "[a-z]{3} "},
            {
                "type": "tag",
                "begin": "<f>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</f>",
            },
        ],
    },
}


class Request(NamedTuple):
    prompt: str
    params: dict[str, Any]
    length: int = LENGTH


def structured(**what: Any) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**what), "ignore_eos": False}


def requests(end: int, early: int) -> list[dict[str, Request]]:
    """Batches of requests by name, no two with the same prompt.

    `end` is the fourth token of "stop token", inside its first accepted path, `early` the third of
    "min tokens".
    """
    from vllm.sampling_params import RepetitionDetectionParams

    loop = RepetitionDetectionParams(max_pattern_size=40, min_pattern_size=2, min_count=2)
    kept = {"stop": ["put of"], "include_stop_str_in_output": True}
    trees = {
        "greedy": Request(PROMPTS[0], {}),
        "sampled": Request(PROMPTS[0] + "x", {**SAMPLED, "top_p": 0.9}),
        "allowed": Request(PROMPTS[2], {"allowed_token_ids": [*range(66, 100), *range(300, 330)]}),
        "one token": Request(PROMPTS[2] + "x", {}, 1),
        "four tokens": Request(PROMPTS[2] + "y", {}, 4),
        "stop token": Request(PROMPTS[5], {"ignore_eos": False, "stop_token_ids": [end]}),
        "stop string": Request(PROMPTS[5] + " ValueError('queue", {"stop": ["is em", "'"]}),
        "stop string kept": Request(PROMPTS[5] + " V", kept),
        "min tokens": Request("#" + PROMPTS[5], {"stop_token_ids": [early], "min_tokens": 9}),
        "to the limit": Request("##" + PROMPTS[5], {}, 99),
    }
    anything = structured(regex=r"[ -~]+")
    chains = {
        "presence": Request(PROMPTS[3], {"presence_penalty": 0.8}),
        "frequency": Request(PROMPTS[3] + "\n", {"frequency_penalty": 1.5}),
        "bad words": Request(PROMPTS[3] + "y", {"bad_words": ["print", "range(10", "x"]}),
        "think": Request(PROMPTS[0] + "<|user|>", {"thinking_token_budget": 3}),
        "think on": Request(PROMPTS[0] + "<|user|>ab", {"thinking_token_budget": 9, **SAMPLED}),
        "loop": Request("x = 0\n" * 9, {"repetition_detection": loop}),
        "regex": Request(PROMPTS[1] + "1", {**structured(regex=REGEX), **SAMPLED}),
        "choice": Request(PROMPTS[1] + "3", structured(choice=CHOICES)),
        "json": Request(PROMPTS[1] + "4", structured(json=SCHEMA), 40),
        "grammar": Request(PROMPTS[1] + "5", structured(grammar=GRAMMAR), 40),
        "tag": Request(PROMPTS[1] + "7", structured(structural_tag=json.dumps(TAG)), 48),
        "constrained": Request(PROMPTS[1] + "6", {**anything, "presence_penalty": 1.0}),
    }
    ids = {"logprob_token_ids": [7, 199, 1000]}
    logprobs = {
        "best 20": Request(PROMPTS[4], {"logprobs": 20, "prompt_logprobs": 3}),
        "the token alone": Request(PROMPTS[4] + "y", {"logprobs": 0, "flat_logprobs": True}),
        "given": Request(PROMPTS[4] + "a", ids),
        "given, sampled": Request(PROMPTS[4] + "b", {**ids, "logprobs": 3, **SAMPLED}),
        "given, penalty": Request(PROMPTS[4] + "c", {**ids, "frequency_penalty": 0.5}),
        "none": Request(PROMPTS[4] + "d", {}),
    }
    # Alone in its batch: no other request asks for logprobs there.
    alone = {"given alone": Request(PROMPTS[4] + "e", {"logprob_token_ids": [65]}, 7)}
    return [trees, chains, logprobs, alone]


class Outcome(NamedTuple):
    """One engine's answers, by request."""

    batches: list[dict[str, Request]]
    outputs: dict[str, Any]
    sequences: list[list[int]]

    @property
    def requests(self) -> dict[str, Request]:
        return {name: request for batch in self.batches for name, request in batch.items()}

    def known(self, tokens: list[int]) -> list[int]:
        """The sequence that drafts come from after `tokens`."""
        return next(s for s in self.sequences if s[: len(tokens)] == tokens)


def ask(llm: LLM, batches: list[dict[str, Request]]) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    for batch in batches:
        params = [greedy(r.length, **r.params) for r in batch.values()]
        result = generate(llm, [r.prompt for r in batch.values()], params)
        outputs |= zip(batch, result.outputs, strict=True)
    return outputs


def sequences_of(outputs: Any) -> list[list[int]]:
    return [
        [*output.prompt_token_ids, *sample.token_ids]
        for output in outputs
        for sample in output.outputs
    ]


@pytest.fixture(scope="module")
def plain() -> Outcome:
    """Without speculation; the known sequences go on where a request ended."""
    with open_engine(NANO.target, None, **ENGINE) as llm:
        prompts = {name: r.prompt for name, r in requests(0, 0)[0].items()}
        ended = ["stop token", "min tokens", "stop string", "stop string kept"]
        on = generate(llm, [prompts[name] for name in ended], greedy(LENGTH + DEPTH + 1))
        end, early = on.token_ids[0][3], on.token_ids[1][2]
        assert end not in on.token_ids[0][:3] and early not in on.token_ids[1][:2]
        batches = requests(end, early)
        outputs = ask(llm, batches)
    sequences = sequences_of([*outputs.values(), *on.outputs])
    return Outcome(batches, outputs, sorted(sequences, key=len, reverse=True))


@pytest.fixture(scope="module")
def engine(plain: Outcome) -> Iterator[LLM]:
    """With trees and asynchronous scheduling, which vLLM turns off on the CPU."""
    from vllm.platforms import current_platform

    check = current_platform.check_and_update_config

    def keep_async(_: Any, vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "check_and_update_config", classmethod(keep_async))
        with open_engine(
            NANO.target,
            ddtree(NANO, BUDGET, num_speculative_tokens=DEPTH),
            per_request_spec_decode_metrics="detailed",
            **ENGINE,
        ) as llm:
            yield llm


PLANS = [on_chain, sibling]


def batches(plain: Outcome, plan: Plan) -> list[dict[str, Request]]:
    """A chain has no siblings, and few right drafts then: three of those requests are enough."""
    few = ("frequency", "think", "grammar")
    trees, chains, *logprobs = plain.batches
    return [trees, chains if plan is on_chain else {name: chains[name] for name in few}, *logprobs]


@pytest.fixture(scope="module")
def answers(engine: LLM, plain: Outcome) -> dict[Plan, dict[str, Any]]:
    """By plan of the drafts."""
    result: dict[Plan, dict[str, Any]] = {}
    for plan in PLANS:
        with known_drafts(engine, plain.sequences, plan):
            result[plan] = ask(engine, batches(plain, plan))
    return result


@pytest.mark.parametrize("plan", PLANS)
def test_every_request_as_without_speculation(
    answers: dict[Plan, dict[str, Any]], plain: Outcome, plan: Plan
) -> None:
    for name, output in answers[plan].items():
        for a, b in zip(plain.outputs[name].outputs, output.outputs, strict=True):
            assert list(a.token_ids) == list(b.token_ids), name
            assert a.text == b.text, name
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason), name


@pytest.mark.parametrize("plan", PLANS)
def test_every_round_accepts_what_is_right(
    answers: dict[Plan, dict[str, Any]], plain: Outcome, plan: Plan
) -> None:
    """Four tokens, as long as a sequence goes on."""
    checked = 0
    for name, output in answers[plan].items():
        metrics = output.outputs[0].spec_decode_metrics
        # vLLM gives none for several samples, nor where the detokenizer ends a request; at the
        # length limit trees lose nodes.
        chain = needs_chain(greedy(LENGTH, **plain.requests[name].params))
        if metrics is None or name == "to the limit" or (chain and plan is sibling):
            continue
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        whole = plain.known(tokens)
        emitted, expected = len(output.prompt_token_ids) + 1, []
        while emitted < len(tokens):
            drafts = plain.known(tokens[:emitted])[emitted : emitted + DEPTH]
            pairs = zip(drafts, whole[emitted:], strict=False)
            expected.append(len([*itertools.takewhile(lambda p: p[0] == p[1], pairs)]))
            emitted += expected[-1] + 1
        assert metrics.per_step_accepted == expected, name
        checked += len(expected)
    assert checked > 20


def test_the_ends_lie_inside_accepted_paths(
    answers: dict[Plan, dict[str, Any]], plain: Outcome
) -> None:
    """What the comparisons are about did happen."""
    out = {name: output.outputs[0] for name, output in plain.outputs.items()}
    tokens = {name: list(sample.token_ids) for name, sample in out.items()}
    assert len(tokens["stop token"]) == 4 and out["stop token"].finish_reason == "stop"
    for plan in PLANS:
        # vLLM counts what was accepted, also beyond the end.
        counted = answers[plan]["stop token"].outputs[0].spec_decode_metrics.per_step_accepted
        assert counted == [DEPTH]
    assert out["stop string"].stop_reason == "'" and len(tokens["stop string"]) < LENGTH
    assert out["stop string kept"].text.endswith("put of")
    assert len(tokens["min tokens"]) >= 9
    for plan in PLANS:
        # The end that comes too early was drafted, and refused at its depth.
        counted = answers[plan]["min tokens"].outputs[0].spec_decode_metrics.per_step_accepted
        assert counted[0] == 1
    limit = plain.outputs["to the limit"]
    assert len(limit.prompt_token_ids) + len(tokens["to the limit"]) == MAX_MODEL_LEN
    for plan in PLANS:
        counted = answers[plan]["to the limit"].outputs[0].spec_decode_metrics
        assert sum(counted.per_step_accepted) > 0.6 * len(tokens["to the limit"])
        # Drafts would go beyond it.
        assert counted.per_step_drafted[-1] < BUDGET == counted.per_step_drafted[0]
    assert out["loop"].finish_reason == "repetition" and len(tokens["loop"]) < LENGTH
    assert tokens["think"].index(ANSWER) == 3
    thought = len(plain.outputs["think on"].prompt_token_ids)
    thought -= plain.outputs["think on"].prompt_token_ids.index(THINK) + 1
    assert tokens["think on"].index(ANSWER) == 9 - thought < 9
    assert re.fullmatch(REGEX, out["regex"].text)
    assert out["choice"].text in CHOICES
    assert set(json.loads(out["json"].text)) == {"kind", "ok"}
    call = re.fullmatch(r"(?s)[a-z]{3} <f>(.+)</f>", out["tag"].text)
    assert call and set(json.loads(call[1])) == {"kind", "ok"}
    assert re.fullmatch(r"SELECT col_[12] FROM col_[12]", out["grammar"].text)


def values(entry: dict[int, Any] | None) -> dict[int, tuple[float, int | None]]:
    return {token: (lp.logprob, lp.rank) for token, lp in (entry or {}).items()}


@pytest.mark.parametrize("plan", PLANS)
def test_logprobs_belong_to_their_tokens(
    answers: dict[Plan, dict[str, Any]], plain: Outcome, plan: Plan
) -> None:
    compared = 0
    for batch in plain.batches[2:]:
        for name, request in batch.items():
            a, b = plain.outputs[name], answers[plan][name]
            if name == "none":
                assert b.outputs[0].logprobs is None
                continue
            theirs = [values(entry) for entry in a.outputs[0].logprobs]
            mine = [values(entry) for entry in b.outputs[0].logprobs]
            given = request.params.get("logprob_token_ids")
            if given is not None:
                tokens = b.outputs[0].token_ids
                wanted = [{*given, token} for token in tokens]
                assert [entry.keys() for entry in mine] == wanted, name
            if "prompt_logprobs" in request.params:
                theirs += [values(entry) for entry in a.prompt_logprobs]
                mine += [values(entry) for entry in b.prompt_logprobs]
            for x, y in zip(theirs, mine, strict=True):
                assert x.keys() == y.keys(), name
                for token, (value, rank) in y.items():
                    assert value == pytest.approx(x[token][0], abs=1e-3), name
                    assert rank == x[token][1], name
                    compared += 1
            total = b.outputs[0].cumulative_logprob
            assert total == pytest.approx(a.outputs[0].cumulative_logprob, abs=1e-2), name
    assert compared > 250


def test_every_step_stands_on_the_committed_length(
    engine: LLM, plain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host knows bounds of the lengths only; positions, slots and inputs are exact.

    Requests with a prefix in common write nothing into blocks that another one reads.
    """
    from vllm_ddtree.model_state import DDTreeModelState

    states = model_runner(engine).req_states
    prepare_attn = DDTreeModelState.prepare_attn
    size = ENGINE["block_size"]
    trees = bounds = shared = 0

    def checked(
        self: Any, batch: Any, mode: Any, tables: Any, slots: Any, *args: Any, **more: Any
    ) -> Any:
        nonlocal trees, bounds, shared
        result = prepare_attn(self, batch, mode, tables, slots, *args, **more)
        assert int(batch.input_ids[: batch.num_tokens].min()) >= 0
        starts = batch.query_start_loc[: batch.num_reqs + 1].tolist()
        lengths = states.total_len.gpu[batch.idx_mapping[: batch.num_reqs]].tolist()
        num_logits = (batch.cu_num_logits_np[1:] - batch.cu_num_logits_np[:-1]).tolist()
        seq_lens = batch.seq_lens[: batch.num_reqs].tolist()
        for i, (end, length, n) in enumerate(zip(starts[1:], lengths, num_logits, strict=True)):
            if n > 1:
                assert int(self.runtime.rows.positions[end - n]) == length - 1
                trees += 1
                bounds += int(batch.seq_lens_cpu_upper_bound[i]) > seq_lens[i]
        for table, group in zip(tables, slots, strict=True):
            reads = [
                {*table[i, : -(-seq_len // size)].tolist()} for i, seq_len in enumerate(seq_lens)
            ]
            for i, (start, end) in enumerate(itertools.pairwise(starts)):
                writes = {slot // size for slot in group[start:end].tolist()}
                assert writes <= reads[i]
                others = set().union(*(read for j, read in enumerate(reads) if j != i))
                assert not writes & others
                shared += bool(reads[i] & others)
        return result

    monkeypatch.setattr(DDTreeModelState, "prepare_attn", checked)
    names = ("greedy", "sampled", "stop string kept", "min tokens", "stop token")
    batch = {name: plain.requests[name] for name in names}
    with known_drafts(engine, plain.sequences, now_and_then):
        outputs = ask(engine, [batch])
    for name in names:
        expected = plain.outputs[name].outputs[0].token_ids
        assert outputs[name].outputs[0].token_ids == expected, name
    assert min(trees, bounds, shared) > 0
