# SPDX-License-Identifier: Apache-2.0
"""Our own metrics agree with vLLM's beside them, in one engine with asynchronous scheduling."""

from __future__ import annotations

import logging
import re
from collections import Counter as Tally
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import NANO
from tests.engine.harness import PROMPTS, Counters, generate, greedy, keep_async, open_engine

if TYPE_CHECKING:
    from vllm import LLM

DEPTH, LENGTH = 7, 9
BUDGETS = {1: 12, 2: 1, 3: 0, 5: 12}
"""Nodes in the last step of so many requests."""
SPEC = {
    "method": "ddtree",
    "model": str(NANO.drafter),
    "budget_per_batch_size": [[1, 1, 12], [2, 2, 1], [3, 3, 0], [4, 4, 5]],
}


def read(llm: LLM) -> tuple[Tally[tuple[str, ...]], float]:
    """(name, *labels of its own) -> count, of our counters; the budget in use."""
    counts: Tally[tuple[str, ...]] = Tally()
    budget = -1.0
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:ddtree_")
        if name == "budget":
            budget = metric.value
        elif name != metric.name:
            keys = ("form", "reason", "depth", "rank")
            labels = [metric.labels[key] for key in keys if key in metric.labels]
            counts[(name, *labels)] = metric.value
    return counts, budget


def total(counts: Tally[tuple[str, ...]], name: str) -> int:
    return sum(n for key, n in counts.items() if key[0] == name)


def agree(counts: Tally[tuple[str, ...]], own: Counters, steps: list[Any]) -> None:
    """The numbers with one another, with vLLM's counters and with the requests' own."""
    assert counts["nodes_drafted",] == own.num_draft_tokens
    assert own.num_draft_tokens == sum(n for step in steps for n in step.per_step_drafted)
    by_depth = [counts["accepted_per_depth", str(d)] for d in range(1, DEPTH + 1)]
    assert by_depth == list(own.per_position)
    assert total(counts, "accepted_per_depth") == own.num_accepted_tokens
    assert total(counts, "accepted_per_rank") == own.num_accepted_tokens
    rounds = {key[1:]: n for key, n in counts.items() if key[0] == "rounds" and n}
    assert sum(n for (form, _), n in rounds.items() if form != "none") == own.num_drafts


def test_metrics(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    keep_async(monkeypatch)
    caplog.set_level(logging.INFO)
    engine = {"max_num_seqs": 4, "per_request_spec_decode_metrics": "detailed"}
    with open_engine(NANO.target, SPEC, **engine) as llm:
        core = llm.llm_engine.engine_core.engine_core
        assert type(core.scheduler).__name__ == "AsyncScheduler"
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        before, _ = read(llm)
        assert not any(before.values())

        def run(
            *params: Any, prompts: list[str] = PROMPTS
        ) -> tuple[dict[tuple[str, ...], int], Tally[tuple[str, ...]]]:
            """Rounds by (form, reason) of requests that run at once, and all counts."""
            nonlocal before
            result = generate(llm, prompts[: len(params)], list(params))
            now, budget = read(llm)
            counts, before = now - before, now
            steps = [output.outputs[0].spec_decode_metrics for output in result.outputs]
            agree(counts, result.counters, steps)
            assert budget == BUDGETS[len(params)]
            return {key[1:]: n for key, n in counts.items() if key[0] == "rounds"}, counts

        rounds, counts = run(greedy(40))
        assert rounds.keys() == {("tree", "")}
        assert counts["nodes_drafted",] == 12 * sum(rounds.values())
        assert any(n for key, n in counts.items() if key[0] == "accepted_per_rank" and key[1] > "0")
        # A chain is as long as the draft goes, whatever rows its tree has.
        rounds, counts = run(greedy(40, frequency_penalty=0.2))
        assert rounds.keys() == {("chain", "sampling parameters")}
        assert counts["nodes_drafted",] == DEPTH * sum(rounds.values())
        assert counts["accepted_per_rank", "0"] == total(counts, "accepted_per_rank") > 0
        # Of the same text, so that they end in the same step.
        rounds, _ = run(greedy(LENGTH), greedy(LENGTH), prompts=PROMPTS[:1] * 2)
        assert rounds.keys() == {("chain", "one node")}
        rounds, _ = run(*[greedy(LENGTH)] * 3)
        assert rounds == {("none", "budget 0"): 3 * (LENGTH - 1)}
        # The fifth one's prefill comes beside three others' drafts; the longest ends alone.
        rounds, _ = run(*[greedy(n) for n in (LENGTH, 60, 40, 40, LENGTH)])
        assert rounds["chain", "mixed step"] == 3

        llm.llm_engine.do_log_stats()
    # Once each: where pytest listens to vLLM's own logger too, a record comes twice.
    records = {id(record): record.getMessage() for record in caplog.records}
    lines = [m for m in records.values() if m.startswith("SpecDecoding metrics: ")]
    logged: Tally[tuple[str, ...]] = Tally()
    for line in lines:
        words = line.split("Rounds: ")[1].split(", Accepted by rank")[0]
        for number, form, reason in re.findall(r"(\d+) (\w+)(?: \((.*?)\))?", words):
            logged["rounds", form, reason] += int(number)
    assert logged == {key: n for key, n in before.items() if key[0] == "rounds" and n}
    assert "Budget: 12" in lines[-1]
    rates = re.findall(r"Per-position acceptance rate: ([0-9., ]+), Avg", " ".join(lines))
    assert rates and all(len(each.split(", ")) == DEPTH for each in rates)
    assert any("Accepted by rank: 0." in line or "Accepted by rank: 1." in line for line in lines)
