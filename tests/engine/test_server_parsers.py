# SPDX-License-Identifier: Apache-2.0
"""Reasoning and tool calls that are streamed, several tokens an event, are what comes whole.

The server has two API server processes, which share the engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NANO
from tests.engine.server import Server, serving

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "maxLength": 12}},
                "required": ["text"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("find", "print")
]
ARGUMENTS = r'\{"text": "[a-z]{2} \\"é"\}'
ONE_CALL = r'<tool_call>\n\{"name": "%s", "arguments": ' + ARGUMENTS + r"\}\n</tool_call>"
TWO_CALLS = "def x ?" + ONE_CALL % "find" + r"\n" + ONE_CALL % "print"


def thinking_nano(folder: Path) -> Path:
    """Nano with two of its special tokens as the marks of thinking."""
    target = folder / "target"
    shutil.copytree(NANO.target, target)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    names = {"<|user|>": "<think>", "<|assistant|>": "</think>"}
    for token in tokenizer["added_tokens"]:
        if token["content"] in names:
            token["content"], token["special"] = names[token["content"]], False
    vocabulary = tokenizer["model"]["vocab"]
    for old, new in names.items():
        vocabulary[new] = vocabulary.pop(old)
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("parsers")
    more = (
        "api-server-count: 2\n"
        "reasoning-parser: deepseek_r1\n"
        "enable-auto-tool-choice: true\n"
        "tool-call-parser: hermes\n"
        "structured-outputs-config:\n"
        "  backend: xgrammar\n"
        "  disable_any_whitespace: true\n"
        "  reasoning_parser: deepseek_r1\n"
    )
    with serving(folder, thinking_nano(folder), more, budget=7) as server:
        yield server


def say(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from a stream."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"name": "", "arguments": ""})
                function = message["tool_calls"][call["index"]]
                for key in function:
                    function[key] += call["function"].get(key) or ""
    return message


def whole(message: dict[str, Any]) -> dict[str, Any]:
    keys = ("name", "arguments")
    calls = [{k: c["function"][k] for k in keys} for c in message.get("tool_calls") or []]
    text = {key: message.get(key) or "" for key in ("content", "reasoning")}
    return {**text, "tool_calls": calls}


def test_reasoning(server: Server) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 3}):
        body = {"messages": say("def main(argv):<think>"), "thinking_token_budget": 7, **sampling}
        answer = server.whole(CHAT, **body)
        message = whole(answer["choices"][0]["message"])
        assert message["reasoning"] and message["content"]
        assert "</think>" not in message["reasoning"] + message["content"]
        events = server.streamed(CHAT, **body)
        assert joined(events) == message
        assert len(events) < answer["usage"]["completion_tokens"]  # several tokens an event


def test_tool_calls(server: Server) -> None:
    body = {
        "messages": say("x = 1\n<think>"),
        "thinking_token_budget": 3,  # the grammar begins after it
        "tools": TOOLS,
        "structured_outputs": {"regex": TWO_CALLS},
        "temperature": 0,
        "ignore_eos": False,
        "max_tokens": 160,
    }
    message = whole(server.whole(CHAT, **body)["choices"][0]["message"])
    assert [call["name"] for call in message["tool_calls"]] == ["find", "print"]
    for call in message["tool_calls"]:
        assert '"é' in json.loads(call["arguments"])["text"]
    assert message["content"].startswith("def x")
    assert joined(server.streamed(CHAT, **body)) == message


def test_metrics_of_both_api_servers(server: Server) -> None:
    """A step's counts go to one of them; whichever answers gives the sums. vLLM has no periodic
    line there.
    """

    def ask(i: int) -> None:
        more = {"presence_penalty": 0.4} if i % 2 else {}
        server.whole(CHAT, messages=say("def main(argv):<think>"), temperature=0, **more)

    before, _ = server.metrics()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(6)))
    ask(0)
    found = [server.metrics() for _ in range(6)]
    values, forms = found[0]
    assert all(each == found[0] for each in found)
    assert values["ddtree_nodes_drafted"] > before["ddtree_nodes_drafted"]
    assert values["ddtree_budget"] == [7] and forms["tree", ""] > 0
    log = server.log.read_text()
    assert log.count("disabling stats logging") == 2 and "SpecDecoding metrics" not in log
