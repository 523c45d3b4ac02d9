# SPDX-License-Identifier: Apache-2.0
"""An engine whose clock, rounds and texts are simulated: what `auto` does with them, to the second.

Costs are those of one H200 and an 8B target (benchmarks/results/h200-8b-load/log.txt). What a
budget accepts is what a trained pair accepted, offline, on code and mixed text. Nothing here reads
a clock, and every random number has a seed, so a run gives the same numbers everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_ddtree.budget.auto import PLAIN, AutoBudget, Choice, Watch
from vllm_ddtree.budget.cost import Costs, lowered
from vllm_ddtree.budget.tiers import TIERS, chain_budget
from vllm_ddtree.round.meter import ONE, Reading

ROUNDS_MS = {
    1: {0: 5.14, 1: 6.24, 3: 6.24, 5: 6.24, 7: 6.3, 11: 6.3, 15: 6.3, 23: 6.32, 31: 6.37, 63: 6.46},
    8: {
        0: 5.36,
        1: 6.43,
        3: 6.44,
        5: 6.5,
        7: 6.5,
        11: 6.83,
        15: 6.94,
        23: 8.02,
        31: 9.16,
        63: 14.74,
    },
    32: {0: 5.49, 1: 7.46, 3: 7.66, 5: 9.05, 7: 9.89, 11: 12.83, 15: 15.87, 23: 22.01, 31: 28.33},
    128: {0: 6.64, 1: 15.22, 3: 20.76, 5: 26.33, 7: 33.46},
}
"""Milliseconds a round, by requests and nodes."""
ROWS = 64
DEPTH = 15
COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MIXED = [(1, 0.74), (2, 1.33), (3, 1.78), (4, 2.11), (5, 2.35), (7, 2.69), (11, 3.04), (15, 3.26)]
MIXED += [(31, 3.64), (63, 3.9)]
"""Accepted nodes by budget."""


def round_ms(nodes: int, num_reqs: int) -> float:
    """A round of `num_reqs` requests with `nodes` each, between those measured and beyond."""
    counts = [n for n in ROUNDS_MS if nodes in ROUNDS_MS[n]]
    points = [ROUNDS_MS[n][nodes] for n in counts]
    if num_reqs > counts[-1]:  # as the last two go on
        slope = (points[-1] - points[-2]) / (counts[-1] - counts[-2])
        return points[-1] + slope * (num_reqs - counts[-1])
    return float(np.interp(num_reqs, counts, points))


def graph_of(num_reqs: int) -> int:
    return next(n for n in COUNTS if n >= num_reqs)


@dataclass(frozen=True)
class Text:
    """What a drafter knows of a text, by row of the tree (row 0 is the root)."""

    chances: np.ndarray
    """Of a row to be accepted."""
    claims: np.ndarray
    """The drafter's own path probabilities."""

    @classmethod
    def of(cls, power: float = 1.0, factor: float = 1.0, claimed: float = 0.85) -> Text:
        """The mixed text's chances to a power, times a factor; claims are a share of them."""
        budgets, accepted = zip(*MIXED, strict=True)
        total = np.interp(np.arange(ROWS), (0, *budgets), (0.0, *accepted))
        chances = np.diff(total) ** power * factor
        rows = np.concatenate(([1.0], chances))
        return cls(rows, np.concatenate(([1.0], np.minimum(1.0, chances * claimed))))

    def tokens(self, nodes: int, chain: bool = False) -> float:
        """Expected tokens of a round."""
        chances = self.chain() if chain else self.chances
        return float(chances[: nodes + 1].sum())

    def chain(self) -> np.ndarray:
        """Chances of the rows of a chain, one a depth."""
        chain = np.where(np.arange(ROWS) <= DEPTH, 0.92 * self.chances, 0.0)
        chain[0] = 1.0
        return chain


MIXED_TEXT = Text.of()
EASY = Text.of(power=0.6)
HARD = Text.of(factor=0.3)
# The drafter claims as much as ever, and is never right.
RANDOM = Text(np.array([1.0] + [0.002] * (ROWS - 1)), MIXED_TEXT.claims)


@dataclass(frozen=True)
class Part:
    """So many seconds of so many requests of one text."""

    seconds: float
    requests: int
    text: Text


class Simulation:
    """An engine under `auto`.

    Args:
        parts: of the load, in order.
        measured: (nodes, requests, true ms) -> what the measurement at start has found.
        longer: whether `measured` makes rounds longer only, as what disturbs them does.
        narrow: what trees from few masks accept, over the others; None: there are none.
        scale: (nodes, requests) -> a served round's time over the table's.
        seed: of all that is random.

    """

    def __init__(
        self,
        parts: Sequence[Part],
        measured: Callable[[int, int, float], float] = lambda nodes, n, ms: ms,
        longer: bool = True,
        narrow: float | None = None,
        scale: Callable[[int, int], float] = lambda nodes, n: 1.0,
        seed: int = 0,
    ) -> None:
        self.parts, self._scale, self._narrow = list(parts), scale, narrow
        self._random = np.random.default_rng(seed)
        limit = max(part.requests for part in parts)
        counts = [n for n in COUNTS if n <= graph_of(limit)]
        shapes = {
            (nodes + 1, n): measured(nodes, n, round_ms(nodes, n))
            for nodes in TIERS
            for n in counts
            if nodes == 0
            or ((nodes + 1) * n <= 1024 and any(nodes in r for r in ROUNDS_MS.values()))
            if nodes <= 7 or n <= 32
            if nodes < 63 or n <= 8
        }
        if longer:
            shapes = lowered(shapes)
        chain = chain_budget(DEPTH)
        assert chain is not None
        chains = {shape: ms * 1.005 for shape, ms in shapes.items() if shape[0] == chain + 1}
        few = {
            (rows, n): ms - self._saved(n)
            for (rows, n), ms in shapes.items()
            if narrow is not None and 1 < rows <= 8
        }
        self.costs = Costs(shapes, chains, few)
        self.auto = AutoBudget(self.costs, limit, DEPTH)
        self.watch = Watch(self.auto, self)
        self._meter = np.zeros((8, ROWS), dtype=np.int64)
        self.now = 1000.0
        self.log: list[tuple[float, Choice, float]] = []
        """Of each step its time from the start, what it verified and the tokens it gave."""
        self.best: list[tuple[float, Choice]] = []
        """Whenever it changes, what is taken for the best."""

    def collective_rpc(self, method: object, non_block: bool) -> Future[Any]:
        """The meter's counts, as vLLM's executor answers."""
        answer: Future[Any] = Future()
        reading: Reading = self._meter.tolist()
        answer.set_result([reading])
        return answer

    def run(self) -> Simulation:
        """Serve the whole load."""
        start, nodes, drafts, was_plain, narrow = self.now, 0, 0, True, False
        ends = list(itertools.accumulate(part.seconds for part in self.parts))
        for part, end in zip(self.parts, ends, strict=True):
            while self.now - start < end:
                names = [str(i) for i in range(part.requests)]
                wanted = self.auto[part.requests]
                best = self.auto.choice(part.requests)
                if not self.best or best != self.best[-1][1]:
                    self.best.append((self.now - start, best))
                step: Any = SimpleNamespace(
                    num_scheduled_tokens=dict.fromkeys(names, nodes + 1),
                    scheduled_spec_decode_tokens=dict.fromkeys(names, [-1] * nodes)
                    if nodes
                    else {},
                    num_spec_tokens_to_schedule=wanted,
                )
                self.watch.scheduled(step)
                chain = bool(step.ddtree_chains)
                tokens = self._verify(part, nodes, chain, narrow)
                self.log.append((self.now - start, Choice(nodes, chain, narrow), tokens))
                narrow = bool(step.ddtree_narrow)
                if wanted:
                    drafts += 1
                    if wanted >= DEPTH or was_plain or drafts % 16 == 1:
                        self._build(part)
                        narrow = False
                self.now += 1e-3 * self._ms(part.requests, nodes, wanted, narrow)
                self.watch.step(step, self.now)
                was_plain = nodes == 0
                nodes = wanted
        return self

    def _saved(self, n: int) -> float:
        """Milliseconds that a draft of half the masks saves."""
        return 0.4 * self._draft_ms(n)

    def _draft_ms(self, n: int) -> float:
        return min(0.9 + 0.045 * n, round_ms(1, n) - round_ms(0, n))

    def _ms(self, num_reqs: int, verified: int, drafted: int, narrow: bool) -> float:
        """A step: what a round of its draft costs beyond plain decoding is split between both."""
        n = graph_of(num_reqs)
        draft = self._draft_ms(n)
        verify = round_ms(verified, n) - (draft if verified else 0.0)
        ms = verify + (draft - (self._saved(n) if narrow else 0.0) if drafted else 0.0)
        return ms * self._scale(verified, n) * self._random.normal(1.0, 0.01)

    def _verify(self, part: Part, nodes: int, chain: bool, narrow: bool) -> float:
        if nodes == 0:
            return float(part.requests)
        text = part.text
        chances, claims = (
            (text.chain(), text.chain() * 0.85) if chain else (text.chances, text.claims)
        )
        chances, claims = chances[: nodes + 1], claims.copy()[: nodes + 1]
        claims[0] = 1.0
        if narrow and self._narrow is not None:
            chances = np.concatenate(([1.0], self._narrow * chances[1:]))
            claims = np.ones(nodes + 1)
        accepted = self._random.binomial(part.requests, np.minimum(1.0, chances))
        rows = 6 if narrow else 4 if chain else 1
        self._meter[rows, : nodes + 1] += (claims * ONE * part.requests).astype(np.int64)
        self._meter[rows + 1, : nodes + 1] += accepted
        return float(accepted.sum())

    def _build(self, part: Part) -> None:
        chain = part.text.chain() * 0.85
        chain[0] = 1.0
        self._meter[0] += (part.text.claims * ONE * part.requests).astype(np.int64)
        self._meter[3] += (chain * ONE * part.requests).astype(np.int64)

    # What came of it.

    def _steps(self, start: float, end: float) -> Iterator[tuple[float, Choice, float]]:
        return (step for step in self.log if start < step[0] <= end)

    def tokens_s(self, start: float, end: float) -> float:
        """Tokens a second between two times."""
        return sum(tokens for _, _, tokens in self._steps(start, end)) / (end - start)

    def shares(self, start: float, end: float) -> dict[int, float]:
        """Share of the steps that verified so many nodes."""
        nodes = [choice.nodes for _, choice, _ in self._steps(start, end)]
        return {n: nodes.count(n) / len(nodes) for n in sorted(set(nodes))}

    def static(self, part: Part, choice: Choice) -> float:
        """Tokens a second of a choice that never changes."""
        n = graph_of(part.requests)
        ms = round_ms(choice.nodes, n) * self._scale(choice.nodes, n)
        return 1e3 * part.requests * part.text.tokens(choice.nodes, choice.chain) / ms

    def best_static(self, part: Part) -> tuple[Choice, float]:
        """The best of all that have a graph."""
        n = graph_of(part.requests)
        choices = [Choice(rows - 1, False) for rows, m in self.costs.rounds if m == n]
        return max(((c, self.static(part, c)) for c in choices), key=lambda pair: pair[1])

    def regret(self, start: float, end: float, part: Part) -> float:
        """1 less tokens over those of the best static choice."""
        return 1 - self.tokens_s(start, end) / self.best_static(part)[1]


def steady(requests: int, text: Text, seconds: float = 6.0, **keys: Any) -> Simulation:
    """A load that does not change."""
    return Simulation([Part(seconds, requests, text)], **keys).run()


__all__ = ["EASY", "HARD", "MIXED_TEXT", "PLAIN", "RANDOM", "Part", "Simulation", "steady"]
