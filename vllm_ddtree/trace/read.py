# SPDX-License-Identifier: Apache-2.0
"""Rounds of an engine's file, as objects; NumPy and vLLM are not needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Round:
    """One round of one request. Rows are those of the tree, row 0 is the root."""

    form: str
    """"tree", "chain", or "none" for a round without a draft."""
    reason: str
    """Why it was no tree."""
    emitted: tuple[int, ...]
    """The accepted tokens, then the bonus token."""
    root: int
    """The token before them. That of a prefill is the prompt's last."""
    prefill: bool = False
    """Whether it is the end of a prefill, in a step with rounds. Other prefills are not written."""
    tokens: tuple[int, ...] = ()
    """Token of each row; without a draft, this and the next four are empty."""
    parents: tuple[int, ...] = ()
    """Row of each row's parent, -1 for the root and for rows that lead nowhere."""
    probabilities: tuple[float, ...] = ()
    """The drafter's probability of the path to each row."""
    chain: tuple[int, ...] = ()
    """The drafter's most probable token at each depth."""
    path: tuple[int, ...] = ()
    """Accepted rows, the root first."""

    @property
    def num_nodes(self) -> int:
        """Nodes that were verified."""
        return sum(parent >= 0 for parent in self.parents)

    def children(self, row: int) -> list[int]:
        """In order of rank."""
        return [child for child, parent in enumerate(self.parents) if parent == row]

    def ranks(self) -> list[int]:
        """Place of each row's token among the candidates of its draft position; -1 for the root.

        A tree takes siblings in order of rank, so it is the place among the siblings.
        """
        seen: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(seen.get(parent, 0) if parent >= 0 else -1)
            seen[parent] = seen.get(parent, 0) + 1
        return ranks

    def depths(self) -> list[int]:
        """Distance of each row from the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def chain_rows(self) -> list[int]:
        """Rows that the drafter's chain has too, in path order, without the root."""
        rows, row = [], 0
        while children := self.children(row):
            row = children[0]
            rows.append(row)
        return rows

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Round:
        """From a line of the file."""
        lists = ("emitted", "tokens", "parents", "probabilities", "chain", "path")
        return cls(
            entry["form"],
            entry["reason"],
            root=entry["root"],
            prefill=entry["prefill"],
            **{name: tuple(entry.get(name, ())) for name in lists},
        )


@dataclass
class Request:
    """The rounds of one request, in order."""

    name: str
    rounds: list[Round] = field(default_factory=list)

    def token_ids(self) -> list[int]:
        """The text. What a prefill gave is a root after it."""
        text: list[int] = []
        for each in self.rounds:
            if not each.prefill and text[-1:] != [each.root]:
                text.append(each.root)
            text += each.emitted
        return text

    def chain_taken(self, number: int) -> int:
        """Nodes of the drafter's chain that the target would have accepted in a round.

        The target's text says so, as far as the text goes.
        """
        this = self.rounds[number]
        text = [token for each in self.rounds[number:] for token in each.emitted]
        taken = 0
        for mine, theirs in zip(this.chain, text, strict=False):
            if mine != theirs:
                break
            taken += 1
        return taken


@dataclass
class Trace:
    """What a file holds."""

    engine: dict[str, Any]
    """Models and keys of the engine that wrote last."""
    requests: list[Request]

    @property
    def rounds(self) -> list[Round]:
        """Of all requests."""
        return [each for request in self.requests for each in request.rounds]


class TraceReader:
    """Follows a file that is still being written."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.trace = Trace({}, [])
        self._by_name: dict[str, Request] = {}

    def update(self) -> Trace:
        """Read what is new.

        Raises:
            ValueError: a line is no line of such a file; it is named.

        """
        if not self._path.exists():
            return self.trace
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._take(whole.splitlines())
        return self.trace

    def _take(self, lines: Sequence[bytes]) -> None:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                if "engine" in entry:
                    self.trace.engine = entry["engine"]
                    self._by_name = {}  # a new engine's requests may have the names of an older's
                    continue
                name, this = entry["request"], Round.of(entry)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self._path}: line {number} is no round ({error}); give a file that an "
                    "engine wrote with VLLM_DDTREE_ROUNDS"
                ) from error
            if name not in self._by_name:
                self._by_name[name] = Request(name)
                self.trace.requests.append(self._by_name[name])
            self._by_name[name].rounds.append(this)


def read_trace(path: Path) -> Trace:
    """All rounds of a file.

    Raises:
        ValueError: it is no such file.

    """
    return TraceReader(path).update()


def acceptance(rounds: Iterable[Round]) -> dict[str, list[int]]:
    """How often nodes were accepted, by depth and by rank.

    Returns:
        reached: rounds with a draft in which the target had accepted depth d - 1, by d from 1.
        depths: of these, accepted nodes of depth d.
        ranks: accepted nodes by rank, from 0.

    """
    reached: list[int] = []
    depths: list[int] = []
    ranks: list[int] = []

    def add(counts: list[int], place: int) -> None:
        counts.extend([0] * (place + 1 - len(counts)))
        counts[place] += 1

    for each in rounds:
        if not each.tokens:
            continue
        own, deepest = each.ranks(), max(each.depths())
        for depth, row in enumerate(each.path[1:]):
            add(depths, depth)
            add(ranks, own[row])
        for depth in range(min(len(each.path), deepest)):
            add(reached, depth)
    depths.extend([0] * (len(reached) - len(depths)))
    return {"reached": reached, "depths": depths, "ranks": ranks}
