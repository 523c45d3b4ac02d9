# SPDX-License-Identifier: Apache-2.0
"""Reading a file of rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ddtree.trace.read import Request, Round, TraceReader, acceptance, read_trace

ENTRY: dict[str, Any] = {
    "request": "r",
    "form": "tree",
    "reason": "",
    "prefill": False,
    "root": 1,
    "emitted": [4, 5, 6],
    "tokens": [1, 2, 3, 4, 5],
    "parents": [-1, 0, 1, 0, 3],
    "probabilities": [1.0, 0.5, 0.25, 0.2, 0.1],
    "chain": [2, 3],
    "path": [0, 3, 4],
}
FIRST = {
    "request": "r",
    "form": "none",
    "reason": "no drafts",
    "prefill": True,
    "root": 0,
    "emitted": [1],
}


def test_a_round() -> None:
    this = Round.of(ENTRY)
    assert this.num_nodes == 4 and this.ranks() == [-1, 0, 0, 1, 0]
    assert this.depths() == [0, 1, 2, 1, 2] and this.chain_rows() == [1, 2]
    assert Round.of(FIRST).tokens == () and Round.of(FIRST).num_nodes == 0


def test_rows_that_lead_nowhere() -> None:
    """Of a chain in a tree's rows, behind its deepest."""
    this = Round.of({**ENTRY, "form": "chain", "parents": [-1, 0, 1, -1, -1]})
    assert this.num_nodes == 2 and this.ranks() == [-1, 0, 0, -1, -1]


def test_what_the_chain_would_have_taken() -> None:
    second = {**ENTRY, "emitted": [2, 3, 9], "chain": [2, 3, 9]}
    request = Request("r", [Round.of(each) for each in (FIRST, ENTRY, second, FIRST)])
    assert [request.chain_taken(number) for number in range(4)] == [0, 0, 3, 0]
    # Further than the round itself went.
    longer = {**ENTRY, "emitted": [2], "chain": [2, 4, 5]}
    assert Request("r", [Round.of(longer), Round.of(ENTRY)]).chain_taken(0) == 3
    text = [1, 4, 5, 6, 2, 3, 9, 1]
    later = [{**second, "root": 6}, FIRST]
    assert Request("r", [*map(Round.of, (FIRST, ENTRY, *later))]).token_ids() == text
    # A prefill of its own step is not written: its token is the next round's root.
    assert Request("r", [*map(Round.of, (ENTRY, *later))]).token_ids() == text


def test_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    reader = TraceReader(path)
    assert reader.update().requests == []
    lines = [json.dumps(each) + "\n" for each in ({"engine": {"target": "t"}}, FIRST, ENTRY)]
    path.write_text(lines[0] + lines[1] + lines[2][:10])
    assert [len(r.rounds) for r in reader.update().requests] == [1], "whole lines"
    path.write_text("".join(lines))
    trace = reader.update()
    assert [len(r.rounds) for r in trace.requests] == [2] and trace.engine == {"target": "t"}
    # Another engine has a request of the same name.
    path.write_text("".join([*lines, *lines[:2]]))
    assert [len(r.rounds) for r in reader.update().requests] == [2, 1]
    assert len(trace.rounds) == 3


@pytest.mark.parametrize("line", ["no JSON", "[]", "{}", '{"request": "r"}'])
def test_another_file(tmp_path: Path, line: str) -> None:
    path = tmp_path / "other.txt"
    path.write_text(json.dumps(FIRST) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="line 2 is no round") as caught:
        read_trace(path)
    assert "VLLM_DDTREE_ROUNDS" in str(caught.value)


def test_acceptance_by_depth_and_rank() -> None:
    missed = {**ENTRY, "emitted": [9], "path": [0]}
    found = acceptance(Round.of(each) for each in (FIRST, ENTRY, missed))
    assert found == {"reached": [2, 1], "depths": [1, 1], "ranks": [1, 1]}
    assert acceptance([]) == {"reached": [], "depths": [], "ranks": []}
