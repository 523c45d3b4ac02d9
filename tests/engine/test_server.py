# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the installed plugin answers right at its OpenAI-compatible endpoints,
streaming and not."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import NANO
from tests.engine.harness import PROMPTS, Result, greedy, run_engine
from tests.engine.server import LENGTH, Server, serving

SEEDED = {"temperature": 0.8, "seed": 6}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), NANO.target) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Result:
    """The prompts of this file offline and without speculation, the first one also sampled."""
    params = [greedy(LENGTH), greedy(LENGTH, **SEEDED), greedy(LENGTH)]
    return run_engine(NANO.target, None, [PROMPTS[0], PROMPTS[0], PROMPTS[3]], params)


def test_the_start_up_line(server: Server) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "method=ddtree" in line]
    assert len(lines) == 1
    for part in ("budget=12", "depth=7", "top_k=12", "block_size=8", str(NANO.drafter)):
        assert part in lines[0]


def test_completions(server: Server, plain: Result) -> None:
    path = "/v1/completions"
    for body, text in (
        ({"prompt": PROMPTS[0], "temperature": 0}, plain.texts[0]),
        ({"prompt": PROMPTS[0], **SEEDED}, plain.texts[1]),
    ):
        answer = server.whole(path, **body)
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == LENGTH
        events = server.streamed(path, **body)
        assert "".join(e["choices"][0]["text"] for e in events) == text
        # An event carries a whole round, so there are fewer than tokens.
        assert 1 < len(events) < LENGTH
        assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_chat(server: Server, plain: Result) -> None:
    # Nano's template is the message itself.
    path, messages = "/v1/chat/completions", [{"role": "user", "content": PROMPTS[3]}]
    answer = server.whole(path, messages=messages, temperature=0)
    assert answer["choices"][0]["message"]["content"] == plain.texts[2]
    events = server.streamed(path, messages=messages, temperature=0)
    deltas = [e["choices"][0]["delta"].get("content") or "" for e in events]
    assert "".join(deltas) == plain.texts[2]


def test_echo_and_logprobs(server: Server, plain: Result) -> None:
    """The prompt comes back before the completion; every token of both has its logprob."""
    path = "/v1/completions"
    body = {"prompt": PROMPTS[0], "temperature": 0, "echo": True, "logprobs": 3}
    answer = server.whole(path, **body)["choices"][0]
    assert answer["text"] == PROMPTS[0] + plain.texts[0]
    logprobs = answer["logprobs"]
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert logprobs["token_logprobs"][0] is None  # nothing comes before the first token
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert min(len(best) for best in logprobs["top_logprobs"][1:]) >= 3
    events = [event["choices"][0] for event in server.streamed(path, **body)]
    assert "".join(event["text"] for event in events) == answer["text"]
    streamed = [event["logprobs"] for event in events if event["logprobs"]]
    assert [t for part in streamed for t in part["tokens"]] == logprobs["tokens"]
    values = [v for part in streamed for v in part["token_logprobs"]]
    assert values[1:] == pytest.approx(logprobs["token_logprobs"][1:], abs=1e-3)
    # A limit of one token, and one sample of several.
    one = server.whole(path, prompt=PROMPTS[0], temperature=0, max_tokens=1)
    assert one["usage"]["completion_tokens"] == 1
    two = server.whole(path, prompt=PROMPTS[0], n=2, max_tokens=6, **SEEDED)["choices"]
    assert len({choice["text"] for choice in two}) == 2


def test_requests_at_once(server: Server, plain: Result) -> None:
    """More than there are slots, streamed and not, greedy and seeded."""

    def ask(i: int) -> str:
        body = {"prompt": PROMPTS[0], **({"temperature": 0} if i % 2 == 0 else SEEDED)}
        if i < 3:
            return server.whole("/v1/completions", **body)["choices"][0]["text"]
        events = server.streamed("/v1/completions", **body)
        return "".join(e["choices"][0]["text"] for e in events)

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(ask, range(6)))
    assert texts == [plain.texts[i % 2] for i in range(6)]


def test_a_bad_request_is_the_clients_and_the_server_lives(server: Server, plain: Result) -> None:
    for bad in ({"min_p": 0.05}, {"logit_bias": {"5": 1.0}}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.whole("/v1/completions", prompt="x", temperature=0.5, **bad)
        assert caught.value.code == 400
        text = caught.value.read().decode()
        assert "min_p and logit_bias sampling parameters are not yet supported" in text
    # More than vLLM's worker has room for.
    for key, value in (
        ("allowed_token_ids", [5] * 1025),
        ("bad_words", [f"{i}" + " a b c d e f" * 9 for i in range(20)]),
        ("stop_token_ids", list(range(200))),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.whole("/v1/completions", prompt="x", min_tokens=1, **{key: value})
        assert caught.value.code == 400
        assert f"{key} has" in caught.value.read().decode()
    harmless = {"min_p": 0, "logit_bias": {}, "prompt": PROMPTS[0], "temperature": 0}
    assert server.whole("/v1/completions", **harmless)["choices"][0]["text"] == plain.texts[0]


def test_metrics(server: Server) -> None:
    """The engine's counts, in a process of its own, reach the API server's /metrics."""
    for more in ({}, {"presence_penalty": 0.4}):
        server.whole("/v1/completions", prompt=PROMPTS[0], temperature=0, **more)
    values, forms = server.metrics()
    assert values["ddtree_budget"] == [12] and len(values["ddtree_accepted_per_depth"]) == 7
    chains = sum(n for (form, _), n in forms.items() if form == "chain")
    assert forms["tree", ""] > 0 and forms["chain", "sampling parameters"] > 0
    assert values["ddtree_nodes_drafted"] == [12 * forms["tree", ""] + 7 * chains]
