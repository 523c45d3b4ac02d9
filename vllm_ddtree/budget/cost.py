# SPDX-License-Identifier: Apache-2.0
"""What a round costs on this machine: measured at start, corrected by the rounds served.

After the CUDA graphs are captured, a dummy round of every captured shape is run and timed: target
forward, logits, draft. All ranks measure at the same time and in the same order, so that
collectives meet. Dummy rounds have next to no context, and a machine under load clocks lower. So
the scheduler corrects the measured times by those of the rounds served.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from vllm_ddtree import integration
from vllm_ddtree.round.marks import ask_for_chains

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

WARM_UP = 2
REPEATS = 5
START_WEIGHT = 8
"""Observed rounds that count as much as the measurement at start."""
WINDOW = 40
"""Rounds over which observed times are averaged."""
FAR = 1.25
"""How far from the mean a round is taken to be at most."""
MEMORY = 2000
"""Rounds after which a third of what a shape showed is left: contexts grow and shrink meanwhile."""

Shape = tuple[int, int]
"""(rows a request, requests) of a captured graph."""


@dataclass
class Costs:
    """Milliseconds a round; empty where vLLM captured no graphs."""

    rounds: dict[Shape, float] = field(default_factory=dict)
    """Target forward, logits and draft (no draft for one row), as measured at start."""
    chains: dict[Shape, float] = field(default_factory=dict)
    """The same of rounds that verify chains, where there are graphs for them."""
    _observed: dict[tuple[Shape, bool], tuple[int, float, int]] = field(default_factory=dict)
    """Rounds seen, their mean time over the measured time, and when the last one was."""
    _near: dict[int, float] = field(default_factory=dict)
    """The latest such mean, by the power of two above the shape's tokens."""
    _latest: float = 1.0
    """The latest such mean of all."""
    _clock: int = 0
    """Rounds of any shape."""
    _counts_by_rows: dict[int, list[int]] = field(default_factory=dict)

    def shape(self, budget: int, num_reqs: int) -> Shape | None:
        """The graph that serves `num_reqs` requests of `budget` nodes; None if there is none."""
        if not self._counts_by_rows:
            for rows, n in sorted(self.rounds):
                self._counts_by_rows.setdefault(rows, []).append(n)
        counts = self._counts_by_rows.get(budget + 1, [])
        index = bisect.bisect_left(counts, num_reqs)
        return (budget + 1, counts[index]) if index < len(counts) else None

    def round_ms(self, budget: int, num_reqs: int, chain: bool = False) -> float | None:
        """A round of `num_reqs` requests with `budget` nodes each; None if no graph serves it."""
        shape = self.shape(budget, num_reqs)
        ms = self._measured(shape, chain)
        return None if shape is None or ms is None else ms * self._correction(shape, chain)

    def _measured(self, shape: Shape | None, chain: bool) -> float | None:
        return None if shape is None else (self.chains if chain else self.rounds).get(shape)

    def observe(self, budget: int, num_reqs: int, ms: float, chain: bool = False) -> None:
        """A round took `ms`. A time that no round can take (a pause, a burst) is not counted."""
        shape = self.shape(budget, num_reqs)
        measured = self._measured(shape, chain)
        if shape is None or measured is None or not 0.5 < ms / measured < 4.0:
            return
        count, mean, weight = 0, 1.0, 1.0
        if (shape, chain) in self._observed:
            count, _, weight = self._remembered(shape, chain)
            mean = self._correction(shape, chain)
        count = round(weight * count) + 1
        # The last step before a request ends comes late: no round alone moves the mean far.
        ratio = min(max(ms / measured, mean / FAR), mean * FAR)
        mean += (ratio - mean) / min(count + START_WEIGHT, WINDOW)
        self._clock += 1
        self._observed[shape, chain] = count, mean, self._clock
        self._near[_size(shape)] = self._latest = mean

    def _remembered(self, shape: Shape, chain: bool) -> tuple[int, float, float]:
        """Rounds observed, their mean, and the weight that is left of that by now."""
        count, mean, last = self._observed[shape, chain]
        return count, mean, math.exp((last - self._clock) / MEMORY)

    def _correction(self, shape: Shape, chain: bool) -> float:
        """Observed over measured time, of this shape or else of one of about as many tokens."""
        if (shape, chain) in self._observed:
            _, mean, weight = self._remembered(shape, chain)
            return weight * mean + (1.0 - weight) * self._latest
        size = _size(shape)
        for near in (size, size - 1, size + 1):
            if near in self._near:
                return self._near[near]
        return 1.0


def _size(shape: Shape) -> int:
    return (shape[0] * shape[1] - 1).bit_length()


def _round(runner: GPUModelRunner, rows: int, num_reqs: int, chain: bool) -> None:
    """One dummy round, with no live tree in it."""
    state, logits = integration.dummy_step(
        runner, num_reqs, rows, lambda output: ask_for_chains(output, chain)
    )
    logits.argmax(-1)
    if rows == 1:
        return
    # As after a verify step that accepted nothing.
    step = runner.model_state.runtime.step
    step.verified, step.has_plain_rows = True, False
    integration.dummy_draft(runner, state, rows - 1, num_drafts=rows - 1)


def measurable(shapes: Iterable[Shape], max_drafts: int) -> list[Shape]:
    """The shapes in order of tokens.

    Shapes of more requests than the draft's buffers hold are left out: vLLM never lets so many run
    (`max_num_active_seqs`).
    """
    fitting = {(rows, n) for rows, n in shapes if rows == 1 or n <= max_drafts}
    return sorted(fitting, key=lambda shape: (shape[0] * shape[1], shape))


def _time(runner: GPUModelRunner, rows: int, num_reqs: int, chain: bool) -> float:
    """Milliseconds of a dummy round."""
    for _ in range(WARM_UP):
        _round(runner, rows, num_reqs, chain)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for i in range(REPEATS):
        _round(runner, rows, num_reqs, chain)
        events[i + 1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


@torch.inference_mode()
def measure(worker: Worker) -> Costs:
    """Time a round of every shape that a worker has a FULL graph for, before the first request.

    With LoRA, every request has an adapter meanwhile.

    All ranks repeat a round equally often: the number follows from the shapes alone.
    """
    runner = worker.model_runner
    costs = Costs()
    manager = runner.cudagraph_manager
    if manager is None or not torch.cuda.is_available():
        return costs
    shapes = measurable(
        (
            (desc.num_tokens // desc.num_reqs, desc.num_reqs)
            for desc in manager.graphs
            if desc.num_reqs and desc.num_tokens % desc.num_reqs == 0 and not desc.num_active_loras
        ),
        runner.scheduler_config.max_num_batched_tokens // runner.speculator.num_query_per_req,
    )
    chains = {
        (desc.num_tokens // desc.num_reqs, desc.num_reqs)
        for desc in getattr(manager.graphs, "chains", {})
    }
    with integration.dummy_adapters(runner), integration.random_tokens(runner):
        for shape in shapes:
            costs.rounds[shape] = _time(runner, *shape, chain=False)
            if shape in chains:
                costs.chains[shape] = _time(runner, *shape, chain=True)
    # Dummy rounds name indices of requests: leave no trees there, and no counts.
    runtime = runner.model_state.runtime
    runtime.trees.parents.fill_(-1)
    runtime.meter.reset()
    return costs
