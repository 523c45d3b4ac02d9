# SPDX-License-Identifier: Apache-2.0
"""Random requests for the soak, and what every answer must fulfil whatever it says."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["x", "y"]}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
REGEX = "[a-z]{2,8} = [0-9]{1,4}"
CHOICES = ["return", "raise", "continue"]
BAD_WORDS = ["self", "return", "import", "None"]
STOPS = ["\n\n", "def ", "return", ":\n", "="]


@dataclass
class Request:
    """One request; `params` are the arguments of SamplingParams."""

    name: str
    prompt: list[int]
    params: dict[str, Any]
    wrong: str = ""  # why it must be refused
    structure: str = ""  # kind of structured output
    abort_after: float | None = None  # seconds
    cancel: bool = False  # the abort: the client goes away, else it asks for it
    bad_tokens: list[list[int]] = field(default_factory=list)

    @property
    def repeatable(self) -> bool:
        """Whether a second run must give the same tokens."""
        greedy = self.params["temperature"] == 0
        return not self.wrong and (greedy or "seed" in self.params)

    def seed(self, sample: int) -> int:
        """Seed of one of the samples, as vLLM's ParentRequest gives it."""
        return self.params["seed"] + (sample if self.params.get("n", 1) > 1 else 0)


@dataclass(frozen=True)
class Sample:
    """What one sample of a request came to; `logprobs` of its tokens, where asked for."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[float] | None = None


class Requests:
    """Draws requests.

    Args:
        windows: long token sequences to cut prompts from.
        encode: text -> token ids.
        max_model_len: tokens.
        vocab_size: tokens that there are.
        eos: id of the end of text.
        abort_share: share of requests that are aborted, each within `abort_within` seconds.
        max_tokens: longest answer.
        seed: of everything drawn.

    """

    def __init__(
        self,
        windows: Sequence[list[int]],
        encode: Any,
        max_model_len: int,
        vocab_size: int,
        eos: int,
        abort_share: float = 0.1,
        abort_within: float = 1.0,
        max_tokens: int = 200,
        seed: int = 0,
    ) -> None:
        self.windows, self.encode = windows, encode
        self.max_model_len, self.vocab_size, self.eos = max_model_len, vocab_size, eos
        self.abort_share, self.abort_within = abort_share, abort_within
        self.max_tokens = max_tokens
        self.rng = random.Random(seed)
        self.count = 0

    def draw(self) -> Request:
        """The next request; one in forty is wrong."""
        self.count += 1
        name = f"soak-{self.count}"
        if self.count % 40 == 5:
            return self._wrong(name)
        request = Request(name, self._prompt(), self._sampling())
        self._limits(request)
        self._extras(request)
        if self.rng.random() < self.abort_share:
            request.abort_after = self.rng.uniform(0, self.abort_within)
            request.cancel = self.rng.random() < 0.5
        return request

    def _log_uniform(self, low: int, high: int) -> int:
        return min(high, int(low * (high / low + 1) ** self.rng.random()))

    def _prompt(self) -> list[int]:
        """1 to max_model_len - 1 tokens; four in ten share a beginning with others."""
        longest = self.max_model_len - 1
        length = longest if self.rng.random() < 0.01 else self._log_uniform(1, longest)
        window = self.rng.choice(self.windows)
        if self.rng.random() < 0.4:
            shared = self.windows[self.rng.randrange(min(4, len(self.windows)))]
            return (shared[: length * 2 // 3] + window)[:length]
        start = self.rng.randrange(max(1, len(window) - length))
        return window[start : start + length]

    def _sampling(self) -> dict[str, Any]:
        rng = self.rng
        params: dict[str, Any] = {"temperature": 0.0}
        if rng.random() < 0.4:
            return params
        params["temperature"] = rng.choice([0.3, 0.6, 0.8, 1.0, 1.3])
        if rng.random() < 0.9:
            params["seed"] = rng.randrange(1 << 31)
        if rng.random() < 0.4:
            params["top_p"] = rng.choice([0.5, 0.8, 0.95])
        if rng.random() < 0.4:
            params["top_k"] = rng.choice([1, 5, 20, 100])
        return params

    def _limits(self, request: Request) -> None:
        rng, params = self.rng, request.params
        params["max_tokens"] = self._log_uniform(1, self.max_tokens)
        params["ignore_eos"] = rng.random() < 0.5
        room = min(params["max_tokens"], self.max_model_len - len(request.prompt))
        draw = rng.random()
        if draw < 0.1:
            params["min_tokens"] = rng.randint(0, room)
        elif draw < 0.25:
            params["stop"] = rng.sample(STOPS, rng.randint(1, 2))
            params["include_stop_str_in_output"] = rng.random() < 0.3
        if rng.random() < 0.1:
            params["stop_token_ids"] = rng.sample(request.prompt, 1)
        if "stop" not in params and rng.random() < 0.2:
            params["detokenize"] = False

    def _extras(self, request: Request) -> None:
        rng, params = self.rng, request.params
        if rng.random() < 0.2:
            params["logprobs"] = rng.randint(0, 20)
        if rng.random() < 0.05:
            params["prompt_logprobs"] = rng.randint(0, 5)
        if rng.random() < 0.05 and params["temperature"]:
            params["n"] = rng.randint(2, 3)
        draw = rng.random()
        if 0.1 <= draw < 0.15 or 0.2 <= draw < 0.26:
            # What the mask leaves out is not known to the judge, so no limit may depend on it.
            params.pop("top_p", None), params.pop("top_k", None)
        if draw < 0.1:
            params["presence_penalty"] = rng.choice([0.0, 0.5, 1.5])
            params["frequency_penalty"] = rng.choice([0.0, 0.3])
            params["repetition_penalty"] = rng.choice([1.0, 1.2])
        elif draw < 0.15:
            words = rng.sample(BAD_WORDS, 2)
            params["bad_words"] = words
            request.bad_tokens = [self.encode(word) for word in words]
        elif draw < 0.2:
            params["allowed_token_ids"] = sorted({self.eos, *self.rng.choice(self.windows)[:80]})
        elif draw < 0.26 and "min_tokens" not in params and "stop" not in params:
            request.structure = rng.choice(["json", "regex", "choice"])
            params["detokenize"] = True
            params["ignore_eos"] = False
            params.pop("stop_token_ids", None)

    def _wrong(self, name: str) -> Request:
        """A request that must be refused on its own."""
        prompt, params = self.windows[0][:5], {"temperature": 0.0, "max_tokens": 20}
        wrong: dict[str, tuple[list[int], dict[str, Any]]] = {
            "prompt too long": ((self.windows[0] * 2)[: self.max_model_len + 5], {}),
            "no prompt": ([], {}),
            "no such token": ([*prompt, self.vocab_size + 5], {}),
            "no such allowed token": (prompt, {"allowed_token_ids": [self.vocab_size + 5]}),
            "too many logprobs": (prompt, {"logprobs": 5000}),
            "negative temperature": (prompt, {"temperature": -1.0}),
            "min_p": (prompt, {"temperature": 1.0, "min_p": 0.1}),
            "logit_bias": (prompt, {"logit_bias": {5: 2.0}}),
        }
        why = self.rng.choice([*wrong, "regex"])
        if why == "regex":
            return Request(name, prompt, params, wrong=why, structure="bad regex")
        ids, more = wrong[why]
        return Request(name, ids, {**params, **more}, wrong=why)


def sampling_params(request: Request) -> Any:
    """vLLM's SamplingParams; raises what vLLM raises for a wrong value."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structures: dict[str, dict[str, Any]] = {
        "json": {"json": SCHEMA},
        "regex": {"regex": REGEX},
        "choice": {"choice": CHOICES},
        "bad regex": {"regex": "([a-z"},
    }
    more: dict[str, Any] = {"output_kind": RequestOutputKind.FINAL_ONLY}
    if request.structure:
        more["structured_outputs"] = StructuredOutputsParams(**structures[request.structure])
    return SamplingParams(**request.params, **more)


def faults(request: Request, output: Any, max_model_len: int, eos: int) -> list[str]:
    """What is wrong with vLLM's RequestOutput of a finished request, by its own parameters."""
    params, found = request.params, []
    if len(output.outputs) != params.get("n", 1):
        found.append(f"{len(output.outputs)} samples")
    asked = params.get("prompt_logprobs")
    if asked is not None and len(output.prompt_logprobs or []) != len(request.prompt):
        found.append("prompt_logprobs of another length")
    for sample in output.outputs:
        found += _sample_faults(request, sample, max_model_len, eos)
    return found


def _sample_faults(request: Request, sample: Any, max_model_len: int, eos: int) -> list[str]:
    params, tokens, found = request.params, list(sample.token_ids), []
    end, limit = sample.finish_reason, params["max_tokens"]
    room = max_model_len - len(request.prompt)
    if end not in ("stop", "length"):
        found.append(f"finish reason {end}")
    if not 0 < len(tokens) <= limit:
        found.append(f"{len(tokens)} tokens, at most {limit} asked for")
    if end == "length" and len(tokens) != min(limit, room):
        found.append(f"ended by length at {len(tokens)} of {min(limit, room)} tokens")
    stops = set(params.get("stop_token_ids", ()))
    stops |= set() if params["ignore_eos"] else {eos}
    early = tokens[: max(params.get("min_tokens", 0), len(tokens) - 1)]
    if stops & set(early):
        found.append("a stop token before the end")
    if end == "stop" and len(tokens) < params.get("min_tokens", 0):
        found.append("ended before min_tokens")
    if not set(tokens) <= set(params.get("allowed_token_ids", tokens)):
        found.append("a token that is not allowed")
    for bad in request.bad_tokens:
        if any(tokens[i : i + len(bad)] == bad for i in range(len(tokens))):
            found.append("a bad word")
    if not params.get("include_stop_str_in_output", False) and any(
        stop in sample.text for stop in params.get("stop", ())
    ):
        found.append("a stop string in the text")
    if (asked := params.get("logprobs")) is not None:
        rows = sample.logprobs or []
        if len(rows) != len(tokens):
            found.append(f"logprobs of {len(rows)} of {len(tokens)} tokens")
        for token, row in zip(tokens, rows, strict=False):
            if token not in row or not max(asked, 1) <= len(row) <= asked + 1:
                found.append("logprobs without the token, or of another number")
                break
    if request.structure and end == "stop":
        found += _structure_faults(request.structure, sample.text)
    return found


def _structure_faults(kind: str, text: str) -> list[str]:
    if kind == "json":
        try:
            value = json.loads(text)
        except ValueError:
            return [f"no JSON: {text!r}"]
        fits = isinstance(value, dict) and set(value) == {"name", "size"}
        fits = fits and value["name"] in ("x", "y") and isinstance(value["size"], int)
    elif kind == "regex":
        fits = re.fullmatch(REGEX, text) is not None
    else:
        fits = text in CHOICES
    return [] if fits else [f"not as asked for ({kind}): {text!r}"]


def samples_of(output: Any) -> list[Sample]:
    """The samples of vLLM's RequestOutput."""
    samples = []
    for one in output.outputs:
        tokens = list(one.token_ids)
        logprobs = None
        if one.logprobs is not None:
            logprobs = [row[t].logprob for t, row in zip(tokens, one.logprobs, strict=True)]
        samples.append(Sample(tokens, one.text, one.finish_reason, logprobs))
    return samples
