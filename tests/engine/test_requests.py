# SPDX-License-Identifier: Apache-2.0
"""Each request has the result that it has without speculation, in one batch of all kinds: sampling
that depends on earlier tokens, logprobs, structured output, stops."""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, Result, ddtree, generate, greedy, open_engine, run_engine

if TYPE_CHECKING:
    from vllm import SamplingParams

ENGINE: dict[str, Any] = {
    "block_size": 32,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 1024,
    # Else a model this small fills its JSON with blanks.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
LENGTH = 13
BUDGET = 9
REGEX = r"[a-c]{4}=[0-9]{3}"
CHOICES = ["alpha", "beta", "gamma_ray"]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["list", "dict"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["kind", "size", "ok"],
    "additionalProperties": False,
}


class Request(NamedTuple):
    prompt: str
    params: dict[str, Any]
    length: int = LENGTH


def _structured(**what: Any) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**what), "ignore_eos": False}


# Without it the request stops earlier, at a newline.
MIN_TOKENS = 11


@functools.cache
def requests(pair: Pair) -> dict[str, Request]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(pair.target))
    newlines = [i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])]
    lower = [i for i in range(len(tokenizer)) if re.fullmatch(r"[ \n_a-m]+", tokenizer.decode([i]))]
    sampled = {"temperature": 0.8, "seed": 9}
    stop = {"ignore_eos": False, "stop_token_ids": newlines}
    return {
        "tree": Request(PROMPTS[0], {}),
        "tree sampled": Request(PROMPTS[2], {"temperature": 0.6, "seed": 2}),
        "two samples": Request(PROMPTS[2], {"temperature": 1.0, "seed": 5, "n": 2}),
        "logprobs": Request(PROMPTS[3], {"logprobs": 5, "prompt_logprobs": 2}),
        "logprobs sampled": Request(PROMPTS[0], {"logprobs": 5, "temperature": 0.7, "seed": 1}),
        "the token's logprob alone": Request(PROMPTS[5], {"logprobs": 0}),
        "presence": Request(PROMPTS[3], {"presence_penalty": 0.8}),
        "frequency": Request(PROMPTS[3], {"frequency_penalty": 1.0, "logprobs": 2}),
        "repetition sampled": Request(PROMPTS[5], {"repetition_penalty": 1.2, **sampled}),
        "bad words": Request(PROMPTS[3], {"bad_words": ["print", "range(10", "x"]}),
        "stop token": Request(PROMPTS[5], stop),
        "min tokens": Request(PROMPTS[5], {**stop, "min_tokens": MIN_TOKENS}),
        "allowed tokens": Request(PROMPTS[0], {"allowed_token_ids": lower}),
        "regex of anything": Request(PROMPTS[3], _structured(regex=r"[ -~\n]{200}")),
        "regex sampled": Request(PROMPTS[0], {**_structured(regex=REGEX), **sampled}),
        "choice": Request(PROMPTS[0], _structured(choice=CHOICES)),
        "json": Request(PROMPTS[0], _structured(json=SCHEMA), 40),
        "stop string": Request(PROMPTS[5], {"stop": ["is full"]}, 24),
    }


def params(pair: Pair) -> list[SamplingParams]:
    return [greedy(r.length, **r.params) for r in requests(pair).values()]


def run(pair: Pair, spec: dict[str, Any] | None) -> Result:
    prompts = [r.prompt for r in requests(pair).values()]
    metrics = "detailed" if spec else "none"
    return run_engine(
        pair.target,
        spec,
        prompts,
        params(pair),
        per_request_spec_decode_metrics=metrics,
        **ENGINE,
    )


@functools.cache
def plain(pair: Pair) -> dict[str, Any]:
    return dict(zip(requests(pair), run(pair, None).outputs, strict=True))


@functools.cache
def tree(pair: Pair) -> dict[str, Any]:
    return dict(zip(requests(pair), run(pair, ddtree(pair, BUDGET)).outputs, strict=True))


def test_every_request_as_without_speculation(pair: Pair) -> None:
    expected, got = plain(pair), tree(pair)
    for name in requests(pair):
        for a, b in zip(expected[name].outputs, got[name].outputs, strict=True):
            assert list(a.token_ids) == list(b.token_ids), name
            assert a.text == b.text, name
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason), name


def test_every_kind_of_request_accepts_drafts(pair: Pair) -> None:
    # Not where what the request may say is nothing that the drafter proposes.
    for name, output in tree(pair).items():
        if output.outputs[0].spec_decode_metrics is None:
            # vLLM gives none for several samples, nor where the detokenizer ends a request.
            assert name in ("two samples", "stop string")
        elif name not in ("allowed tokens", "regex sampled", "choice", "json"):
            assert sum(output.outputs[0].spec_decode_metrics.per_step_accepted) > 0, name


def test_the_parameters_matter(pair: Pair) -> None:
    """Without the parameters the outputs would be others: the comparison above sees them."""
    out = {name: list(output.outputs[0].token_ids) for name, output in plain(pair).items()}
    for name in ("presence", "frequency", "bad words"):
        assert out[name] != out["logprobs"], name  # the same prompt, greedy, without them
    assert out["min tokens"] != out["the token's logprob alone"]
    assert len(out["stop token"]) < MIN_TOKENS <= len(out["min tokens"])
    texts = {name: output.outputs[0].text for name, output in plain(pair).items()}
    assert "x" not in texts["bad words"] and "x" in texts["logprobs"]
    assert plain(pair)["stop string"].outputs[0].stop_reason == "is full"


def test_structured_output_is_valid(pair: Pair) -> None:
    out = {name: output.outputs[0].text for name, output in tree(pair).items()}
    assert re.fullmatch(REGEX, out["regex sampled"])
    assert out["choice"] in CHOICES
    parsed = json.loads(out["json"])
    assert parsed["kind"] in ("list", "dict") and set(parsed) == {"kind", "size", "ok"}


def _values(entry: dict[int, Any] | None) -> dict[int, tuple[float, int]]:
    return {token: (lp.logprob, lp.rank) for token, lp in (entry or {}).items()}


def test_logprobs_belong_to_their_tokens(pair: Pair) -> None:
    checked = 0
    for name, request in requests(pair).items():
        if "logprobs" not in request.params:
            assert tree(pair)[name].outputs[0].logprobs is None
            continue
        expected, got = plain(pair)[name], tree(pair)[name]
        sample = got.outputs[0]
        assert len(sample.logprobs) == len(sample.token_ids) == request.length
        entries = zip(expected.outputs[0].logprobs, sample.logprobs, strict=True)
        pairs = [(_values(a), _values(b)) for a, b in entries]
        assert all(
            token in mine and len(mine) >= request.params["logprobs"]
            for token, (_, mine) in zip(sample.token_ids, pairs, strict=True)
        ), name
        if "prompt_logprobs" in request.params:
            assert len(got.prompt_logprobs) == len(got.prompt_token_ids)
            entries = zip(expected.prompt_logprobs, got.prompt_logprobs, strict=True)
            pairs += [(_values(a), _values(b)) for a, b in entries]
        for theirs, mine in pairs:
            assert mine.keys() == theirs.keys(), name
            for token, (value, rank) in mine.items():
                assert value == pytest.approx(theirs[token][0], abs=1e-3), name
                assert rank == theirs[token][1], name
                checked += 1
    assert checked > 4 * LENGTH


def test_what_vllm_refuses_with_speculation_stays_refused(nano_pair: Pair) -> None:
    from vllm.exceptions import VLLMValidationError

    message = "min_p and logit_bias sampling parameters are not yet supported with speculative"
    with open_engine(nano_pair.target, ddtree(nano_pair, 4), **ENGINE) as llm:
        for bad in ({"min_p": 0.05}, {"logit_bias": {5: 1.0}}):
            with pytest.raises(VLLMValidationError, match=message):
                llm.generate(PROMPTS[0], greedy(4, temperature=0.5, **bad), use_tqdm=False)
        harmless = greedy(4, temperature=0.5, min_p=0.0, logit_bias={})
        harmless = generate(llm, PROMPTS[:1], harmless)
    assert [len(tokens) for tokens in harmless.token_ids] == [4]
