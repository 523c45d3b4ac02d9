# SPDX-License-Identifier: Apache-2.0
"""`vllm-ddtree tune`: counts of a trace, costs, the budgets that follow."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import command
from tests.conftest import NANO
from vllm_ddtree.cli.errors import WrongUsage
from vllm_ddtree.cli.tune.advise import rates, schedule, settings
from vllm_ddtree.cli.tune.costs import Costs, cost_of, read_costs
from vllm_ddtree.cli.tune.prompts import read_prompts
from vllm_ddtree.cli.tune.seen import Seen, budgets, count
from vllm_ddtree.trace.read import Request, Round

# Four nodes: 1 and 3 under the root, 2 under 1, 4 under 3.
TREE: dict[str, Any] = {
    "request": "r",
    "form": "tree",
    "reason": "",
    "prefill": False,
    "root": 1,
    "tokens": [1, 2, 3, 4, 5],
    "parents": [-1, 0, 1, 0, 3],
    "probabilities": [1.0, 0.5, 0.25, 0.2, 0.1],
    "chain": [2, 3],
}
SECOND = {**TREE, "emitted": [4, 5, 9], "path": [0, 3, 4]}
CHAIN = {**TREE, "emitted": [2, 3, 9], "path": [0, 1, 2]}
NONE = {**TREE, "emitted": [7], "path": [0]}


def requests(*entries: dict[str, Any]) -> list[Request]:
    """Each round a request of its own."""
    return [Request(str(number), [Round.of(entry)]) for number, entry in enumerate(entries)]


def test_every_smaller_budget_is_counted() -> None:
    seen = count(requests(SECOND, CHAIN, NONE, NONE))
    assert (seen.rounds, seen.nodes) == (4, 4)
    assert seen.accepted == {0: 0.0, 1: 0.25, 3: 0.75, 4: 1.0}
    assert seen.chains == {2: 0.5}
    assert (seen.reached, seen.depths, seen.ranks) == ([4, 2], [2, 2], [3, 1])
    # Of 0, 1, 0, 0: a deviation of 0.5, over the root of 4.
    assert seen.errors[1] == pytest.approx(0.25)
    assert seen.length(4) == 2.0 and seen.top_k() == 2


def test_cut_trees_and_chains_are_left_out() -> None:
    cut = {**SECOND, "tokens": [1, 2], "parents": [-1, 0], "path": [0], "emitted": [9]}
    seen = count(requests(SECOND, SECOND, cut, {**CHAIN, "form": "chain"}))
    assert seen.rounds == 2 and seen.accepted[4] == 2.0
    with pytest.raises(ValueError, match="no round of the trace verified a tree"):
        count(requests({**CHAIN, "form": "chain"}))


def test_budgets_to_look_at() -> None:
    assert budgets(12) == [0, 1, 3, 5, 7, 11, 12]
    assert budgets(7) == [0, 1, 3, 5, 7]


LOG = """
INFO ddtree: 1 requests, ms a round by budget: 0 5.00, 3 9.0
[x.py:1] ddtree: 1 requests, ms a round by budget: 0 5.36, 31 9.16, chain of 15 6.98, 7 with few \
masks 6.20
INFO ddtree: 32 requests, ms a round by budget: 0 10.36, 31 no graph
INFO ddtree: 128 requests, ms a round by budget: no graph
"""


def test_costs_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LOG)
    costs = read_costs(path)
    assert costs == {1: {"0": 5.36, "31": 9.16, "chain of 15": 6.98}, 32: {"0": 10.36}}


def test_costs_of_json(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"8": {"0": 6, "7": 8}, "1": {"0": 5}}')
    assert read_costs(path) == {1: {"0": 5.0}, 8: {"0": 6.0, "7": 8.0}}
    for wrong in ('{"8": {"0": -1}}', '{"0": {"0": 1}}', '{"8": {"x": 1}}', "[]", "{}", "text"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="give JSON such as"):
            read_costs(path)
    with pytest.raises(ValueError, match="No such file"):
        read_costs(tmp_path / "nowhere")


def test_costs_between_numbers_of_requests() -> None:
    costs: Costs = {2: {"0": 4.0, "7": 6.0}, 10: {"0": 8.0}}
    assert [cost_of(costs, "0", n) for n in (1, 2, 4, 10, 11)] == [4.0, 4.0, 5.0, 8.0, None]
    assert [cost_of(costs, "7", n) for n in (2, 3)] == [6.0, None]
    assert cost_of(costs, "3", 2) is None


SEEN = Seen(
    rounds=400,
    nodes=7,
    reached=[400],
    depths=[300],
    ranks=[290, 10, 0, 0],
    accepted={0: 0.0, 3: 1.0, 7: 2.0},
    errors={0: 0.0, 3: 0.1, 7: 0.1},
    chains={7: 1.5},
)
COSTS: Costs = {
    1: {"0": 10.0, "3": 11.0, "7": 12.0, "chain of 7": 11.0},
    5: {"0": 10.0, "3": 12.0, "7": 24.0},
    9: {"0": 10.0, "3": 28.0, "7": 60.0},
}


def test_tokens_a_second() -> None:
    best, second, *rest = rates(SEEN, COSTS, 1)
    assert (best.kind, best.tokens) == ("7", pytest.approx(250.0))
    assert (second.kind, second.tokens) == ("chain of 7", pytest.approx(1e3 * 2.5 / 11.0))
    assert [rate.kind for rate in rest] == ["3", "0"]
    assert rates(SEEN, COSTS, 10) == []


def test_ranges_and_settings() -> None:
    # Budget 7 takes 12, 15, 18 ms and 3 takes 11, 11.25, 11.5 ms with 1, 2, 3 requests.
    ranges = schedule(SEEN, COSTS)
    assert ranges == [(1, 2, 7), (3, 7, 3), (8, 9, 0)]
    assert settings(SEEN, COSTS, "d", 16) == {
        "method": "ddtree",
        "model": "d",
        "budget_per_batch_size": [[1, 2, 7], [3, 7, 3], [8, 9, 0]],
        "top_k": 2,
    }
    assert settings(SEEN, {}, "d", None) == {"method": "ddtree", "model": "d", "budget": "auto"}
    one: Costs = {4: COSTS[1]}
    assert settings(SEEN, one, "d", 2) == {"method": "ddtree", "model": "d", "budget": 7}
    plain: Costs = {4: {"0": 1.0, "7": 9.0}}
    assert settings(SEEN, plain, "d", 16) == {}
    few = dataclasses.replace(SEEN, rounds=50)
    assert "top_k" not in settings(few, COSTS, "d", 16)


def test_settings_are_the_products(tmp_path: Path) -> None:
    """What is printed to be pasted is taken."""
    from vllm_ddtree.config.keys import parse

    keys = parse(settings(SEEN, COSTS, "d", 16))
    assert keys.schedule == [(1, 2, 7), (3, 7, 3), (8, 9, 0)] and keys.top_k == 2


def test_prompts(tmp_path: Path) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\n two\n")
    assert read_prompts(text) == ["one", " two"]
    lines.write_text('{"prompt": "one"}\n{"prompt": [1, 2]}\n')
    assert read_prompts(lines) == ["one", [1, 2]]
    lines.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    with pytest.raises(WrongUsage, match='line 2 has neither "prompt" nor "messages"'):
        read_prompts(lines)
    text.write_text("\n")
    with pytest.raises(WrongUsage, match="it is empty"):
        read_prompts(text)


def test_a_trace_of_another_engine(tmp_path: Path) -> None:
    """From a file alone, no engine: tables, then a line to paste."""
    path = tmp_path / "rounds.jsonl"
    engine = {"engine": {"target": "t", "drafter": str(NANO.drafter), "top_k": 16}}
    path.write_text("".join(json.dumps(each) + "\n" for each in (engine, SECOND, CHAIN, NONE)))
    costs = tmp_path / "costs.json"
    costs.write_text('{"1": {"0": 5, "3": 6}}')
    done = command("tune", "--from", str(path), "--costs", str(costs))
    assert done.returncode == 0, done.stderr
    assert "3 rounds with trees of 4 nodes" in done.stdout
    flag, _, spec = done.stdout.splitlines()[-1].partition(" ")
    assert flag == "--speculative-config"
    assert json.loads(spec.strip("'")) == {
        "method": "ddtree",
        "model": str(NANO.drafter),
        "budget": 3,
    }
