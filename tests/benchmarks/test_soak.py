# SPDX-License-Identifier: Apache-2.0
"""The soak's bookkeeping is right, and its judge finds what is wrong, with an engine that answers
from a table."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import soak_judge, soak_report
from benchmarks.soak import compare, engine_failures, growth, parse, slope
from benchmarks.soak_driver import Driver, Hang, Outcome
from benchmarks.soak_requests import Request, Requests, Sample, faults, sampling_params

EOS, VOCAB, MAX_LEN = 0, 64, 128


def draws(count: int, **keys: Any) -> list[Request]:
    windows = [[1 + (i * j) % (VOCAB - 1) for i in range(MAX_LEN)] for j in (1, 3, 5, 7)]
    source = Requests(windows, lambda text: [len(text)], MAX_LEN, VOCAB, EOS, **keys)
    return [source.draw() for _ in range(count)]


def test_requests_are_mixed() -> None:
    requests = draws(2000)
    assert len({request.name for request in requests}) == 2000
    assert len({request.wrong for request in requests}) == 10  # none, and nine wrongs
    right = [request for request in requests if not request.wrong]
    lengths = {len(request.prompt) for request in right}
    assert min(lengths) == 1 and max(lengths) == MAX_LEN - 1
    counts = Counter(key for request in right for key in request.params)
    assert min(counts.values()) > 20, counts
    for key in ("seed", "top_p", "top_k", "stop", "min_tokens", "logprobs", "n", "bad_words"):
        assert counts[key]
    assert {r.structure for r in right} == {"", "json", "regex", "choice"}
    aborted = sum(request.abort_after is not None for request in right)
    assert 0.08 < aborted / len(right) < 0.12
    assert 0.5 < sum(request.repeatable for request in right) / len(right) < 0.99
    assert all(0 < request.params["max_tokens"] <= 200 for request in right)


def answer(request: Request, tokens: list[int], end: str = "length", text: str = "") -> Any:
    rows = None
    if (asked := request.params.get("logprobs")) is not None:
        best = [SimpleNamespace(logprob=-0.1 * t) for t in range(VOCAB)]
        rows = [{t: best[t], **{k: best[k] for k in range(1, asked + 1)}} for t in tokens]
    sample = SimpleNamespace(token_ids=tokens, text=text, finish_reason=end, logprobs=rows)
    return SimpleNamespace(outputs=[sample] * request.params.get("n", 1), prompt_logprobs=None)


BASE = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": False}


@pytest.mark.parametrize(
    ("more", "tokens", "end", "text", "fault"),
    [
        ({}, [5, 6, 7, 8], "length", "", ""),
        ({}, [5, 6, 0], "stop", "", ""),
        ({}, [5, 6, 7], "length", "", "ended by length"),
        ({}, [5, 6, 7, 8, 9], "length", "", "at most"),
        ({}, [5, 0, 6, 7], "length", "", "stop token"),
        ({"ignore_eos": True}, [5, 0, 6, 7], "length", "", ""),
        ({"stop_token_ids": [6]}, [6, 6], "stop", "", "stop token"),
        ({"min_tokens": 3}, [5, 0], "stop", "", "stop token"),
        ({"allowed_token_ids": [5, 6]}, [5, 6, 5, 7], "length", "", "not allowed"),
        ({"stop": ["ab"]}, [5], "stop", "x ab", "stop string"),
        ({"stop": ["ab"], "include_stop_str_in_output": True}, [5], "stop", "x ab", ""),
        ({"n": 2}, [5, 6, 7, 8], "length", "", ""),
        ({}, [5, 6], "abort", "", "finish reason"),
    ],
)
def test_faults(more: dict[str, Any], tokens: list[int], end: str, text: str, fault: str) -> None:
    request = Request("a", [1, 2], {**BASE, **more})
    found = faults(request, answer(request, tokens, end, text), MAX_LEN, EOS)
    assert (fault in " ".join(found)) if fault else not found, found


def test_faults_of_extras() -> None:
    request = Request("a", [1, 2], {**BASE, "logprobs": 3})
    good = answer(request, [5, 6, 7, 8])
    assert not faults(request, good, MAX_LEN, EOS)
    good.outputs[0].logprobs[1].pop(6)
    assert faults(request, good, MAX_LEN, EOS)
    request = Request("a", [1, 2], dict(BASE), bad_tokens=[[6, 7]])
    assert faults(request, answer(request, [5, 6, 7, 8]), MAX_LEN, EOS) == ["a bad word"]
    for kind, right, wrong in (
        ("json", '{"name": "x", "size": 3}', '{"name": "z", "size": 3}'),
        ("regex", "ab = 12", "ab = x"),
        ("choice", "raise", "raises"),
    ):
        request = Request("a", [1, 2], dict(BASE), structure=kind)
        assert not faults(request, answer(request, [5, 0], "stop", right), MAX_LEN, EOS)
        assert faults(request, answer(request, [5, 0], "stop", wrong), MAX_LEN, EOS)
    request = Request("a", [1, 2], {**BASE, "prompt_logprobs": 1})
    assert faults(request, answer(request, [5, 6, 7, 8]), MAX_LEN, EOS)


@pytest.fixture
def vllm_is_there() -> None:
    """Its first import takes longer than an engine may stand still in these tests."""
    sampling_params(Request("r", [1], dict(BASE)))


class Table:
    """An engine that answers after a while, knows who is in flight, and may stand still."""

    errored = False

    def __init__(self, hangs: bool = False) -> None:
        self.hangs, self.flying, self.most = hangs, set[str](), 0
        self.ends: dict[str, asyncio.Event] = {}

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        ids = prompt["prompt_token_ids"]
        if not ids:
            raise ValueError("empty")
        self.flying.add(name)
        self.most = max(self.most, len(self.flying))
        self.ends[name] = asyncio.Event()
        try:
            slow = self.hangs or params.max_tokens == 9
            timeout = 60 if slow else 0.001
            end = "length"
            try:
                await asyncio.wait_for(self.ends[name].wait(), timeout)
                end = "abort"
            except TimeoutError:
                pass
            request = Request(name, ids, {**BASE, "n": params.n})
            yield answer(request, [sum(ids) % VOCAB] * params.max_tokens, end)
        finally:
            self.flying.discard(name)

    async def abort(self, name: str) -> None:
        self.ends[name].set()

    async def reset_prefix_cache(self) -> bool:
        return not self.flying


def test_a_run_accounts_for_every_request(vllm_is_there: None) -> None:
    engine = Table()
    driver = Driver(engine, MAX_LEN, EOS, stall=5)
    requests = [Request(f"r{i}", [1, i], dict(BASE)) for i in range(20)]
    slow = {**BASE, "max_tokens": 9}
    requests.append(Request("asks", [1, 2], slow, abort_after=0.01))
    requests.append(Request("leaves", [1, 2], slow, abort_after=0.01, cancel=True))
    requests.append(Request("too late", [1, 2], dict(BASE), abort_after=30))
    requests.append(Request("empty", [], dict(BASE), wrong="no prompt"))
    requests.append(Request("cold", [1], {**BASE, "temperature": -1.0}, wrong="temperature"))
    requests.append(Request("not wrong", [1], dict(BASE), wrong="nothing"))
    requests.append(Request("unforeseen", [], dict(BASE)))

    async def main() -> list[Outcome]:
        outcomes = await driver.run(requests, 4)
        assert await driver.all_free()
        return outcomes

    outcomes = asyncio.run(main())
    status = {outcome.request.name: outcome.status for outcome in outcomes}
    assert len(outcomes) == len(requests) == len(status)
    assert [status[f"r{i}"] for i in range(20)] == ["finished"] * 20
    assert (status["asks"], status["leaves"], status["too late"]) == (
        "aborted",
        "aborted",
        "finished",
    )
    assert (status["empty"], status["cold"]) == ("refused", "refused")
    assert (status["not wrong"], status["unforeseen"]) == ("failed", "failed")
    assert engine.most == 4 and not engine.flying

    args = parse(["T", "D", "--engines", "tree-7", "--out", "x", "--min-again", "3"])
    memory = {"host": {"growth": 1.0}}
    good = [o for o in outcomes if o.status != "failed"]
    preempted = {"num_preemptions": 3.0}
    assert not engine_failures("e", good, len(good), preempted, memory, 3, args)
    for bad in (
        engine_failures("e", outcomes, len(outcomes), preempted, memory, 3, args),
        engine_failures("e", good, len(good) + 1, preempted, memory, 3, args),
        engine_failures("e", good, len(good), {}, memory, 3, args),
        engine_failures("e", good, len(good), preempted, {"host": {"growth": 1e3}}, 3, args),
        engine_failures("e", good, len(good), preempted, memory, 2, args),
        engine_failures("e", good[:20], 20, preempted, memory, 3, args),
    ):
        assert bad


def test_a_hang_is_noticed(vllm_is_there: None) -> None:
    driver = Driver(Table(hangs=True), MAX_LEN, EOS, stall=0.6)
    with pytest.raises(Hang):
        asyncio.run(driver.run([Request("r", [1], dict(BASE))], 2))


def outcome(tokens: list[int], text: str = "", logprobs: Any = None, **params: Any) -> Outcome:
    request = Request("r", [1, 2], {**BASE, **params})
    return Outcome(request, "finished", [Sample(tokens, text, "length", logprobs)])


def test_comparison() -> None:
    assert compare(outcome([3, 4]), outcome([3, 4]), "e", "alone") == ([], [], [])
    (found,), wrong, _ = compare(outcome([3, 4, 5]), outcome([3, 6, 5]), "e", "alone")
    assert not wrong and (found.at, found.got, found.want, found.context) == (1, 4, 6, [1, 2, 3])
    # The same beginning and another end is no rounding.
    assert compare(outcome([3, 4]), outcome([3, 4, 5]), "e", "alone")[1]
    # But for the tokens after a stop string.
    short, long = outcome([3], "x", stop=["a"]), outcome([3, 4], "x", stop=["a"])
    assert compare(short, long, "e", "alone") == ([], [], [])
    assert compare(short, outcome([3, 4], "y", stop=["a"]), "e", "alone")[1]
    _, wrong, apart = compare(
        outcome([3, 4], "", [-1, -2]), outcome([3, 4], "", [-1.5, -2]), "", ""
    )
    assert not wrong and apart == [0.5, 0]
    assert compare(outcome([3]), Outcome(outcome([3]).request, "failed"), "e", "alone")[1]


def test_memory_trend() -> None:
    readings = [(100 * i, {"a": 50.0 + (8 if i else 0) + 2 * max(0, i - 4)}) for i in range(9)]
    assert growth(readings, "a") == 8
    assert slope([(n, 3.0 * n / 1000) for n in range(0, 900, 100)]) == pytest.approx(3.0)


def test_penalties_as_vllms() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5, 3.0])
    params = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    out = soak_judge.processed(logits, params, [0, 1], [2, 2])
    assert out.tolist() == [1.0, -4.0, 0.5 - 0.5 - 0.5, 0.5, 3.0]
    assert soak_judge.processed(logits, {"allowed_token_ids": [1, 3]}, [], [])[0] == -math.inf


def test_gaps() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    greedy = {"temperature": 0.0}
    assert soak_judge.gap(logits, greedy, 0, 1) == pytest.approx(math.log(0.5 / 0.3))
    warm = {"temperature": 0.5}
    assert soak_judge.gap(logits, warm, 0, 1, noise=-1.0) == pytest.approx(
        abs(math.log(0.5 / 0.3) - 0.5)
    )
    # The better one stands at the edge of top_k, or just outside of top_p.
    edge = math.log(0.3 / 0.15)
    assert soak_judge.gap(logits, {"temperature": 1.0, "top_k": 2}, 1, 0, 9.0) == (
        pytest.approx(edge)
    )
    near = {"temperature": 1.0, "top_p": 0.5 - 1e-3}
    assert soak_judge.gap(logits, near, 1, 0, noise=9.0) == pytest.approx(4e-3, rel=0.01)
    # Or enters by overtaking the better one, or leaves when another overtakes it.
    alone = {"temperature": 1.0, "top_p": 0.1}
    assert soak_judge.gap(logits, alone, 1, 0, noise=9.0) == pytest.approx(math.log(0.5 / 0.3))
    far = {"temperature": 1.0, "top_p": 0.75}
    two_others = math.log(3 * (0.5 + 0.05) / (0.3 + 0.15))  # then have 0.75 before it
    assert soak_judge.gap(logits, far, 0, 3, noise=9.0) == pytest.approx(two_others)
    close = np.array([15.166, 15.012, 14.959, 13.407, 12.271])
    half = {"temperature": 1.0, "top_p": 0.5}
    assert soak_judge.gap(close, half, 1, 0, noise=1.7) == pytest.approx(0.053, abs=1e-4)


def test_noise_is_vllms() -> None:
    """The difference of two tokens' noise decides, to 1/1000, which one vLLM's kernel draws."""
    import torch
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for a, b, seed, position in ((3, 9, 7, 20), (1, 2, 1 << 30, 5)):
        noise = soak_judge.noise_difference(a, b, 16, seed, position)
        assert abs(noise) > 0.01
        drawn = []
        for lead in (2e-3, -2e-3):
            logits = torch.full((1, 16), -math.inf, device=device)
            logits[0, a], logits[0, b] = lead - noise, 0.0
            one = torch.ones(1, device=device)
            place = torch.tensor([position], device=device)
            seeds = torch.tensor([seed], device=device)
            index = torch.zeros(1, dtype=torch.int32, device=device)
            drawn += gumbel_sample(
                logits, index, one, seeds, place, apply_temperature=False, is_drafting=False
            ).tolist()
        assert drawn == [a, b]


def test_verdict(tmp_path: Path) -> None:
    """An unfinished run has not passed, but may have failed."""
    report: dict[str, Any] = {"info": {"gpu": "G", "vllm": "V", "torch": "T"}, "engines": {}}
    report |= {"differences": [], "failures": []}
    for failures, judged, verdict in (
        ([], True, "passed"),
        ([], False, "not finished"),
        (["stalled"], False, "failed"),
        (["stalled"], True, "failed"),
    ):
        soak_report.write({**report, "failures": failures}, tmp_path, judged)
        assert (tmp_path / "soak.md").read_text().splitlines()[-1] == verdict


def test_arguments(tmp_path: Path) -> None:
    args = parse(["T", "D", "--out", str(tmp_path), "--dtype", "bfloat16"])
    assert args.requests == 10_000 and args.tie == 0.5
    assert parse(["T", "D", "--out", "x", "--dtype", "float32"]).tie < 0.01
    with pytest.raises(SystemExit):
        parse(["T", "D", "--out", "x", "--engines", "bush-3"])
