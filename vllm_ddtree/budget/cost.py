# SPDX-License-Identifier: Apache-2.0
"""What a round costs on this machine: measured at start, corrected by the rounds served.

After the CUDA graphs are captured, a dummy round of every captured shape is run and timed: target
forward, logits, draft. All ranks measure at the same time and in the same order, so that
collectives meet. A busy host makes a round longer, never shorter. So all shapes are timed twice, a
while apart, the shortest time counts, and no round costs more than one of more nodes or requests.

The rows of dummy rounds hold random tokens and are no padding, so that a mixture of experts wakes
about as many of its experts as by text. Dummy rounds have next to no context, and a machine under
load clocks lower. So the scheduler corrects the measured times by those of the rounds served.
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
from vllm_ddtree.round.marks import ask_for_chains, ask_for_narrow

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

WARM_UP = 1
PASSES = 2
"""Times that all shapes are timed, one after the other."""
REPEATS = 2
WINDOW = 40
"""Rounds over which observed times are averaged."""
FAR = 1.25
"""How far from the mean a round is taken to be at most."""
VERY_FAR = 1.6
"""The same for a shape that is well known: a busy spell of the host is shorter than that."""
FAR_RUN = 5
"""Rounds in a row, all too long or all too short by more than that, that are believed as they are.
A pause or a burst is one round; a wrong measurement is every round."""
WRONG = 4.0
"""No load makes rounds longer, or shorter, than measured by that factor. Then the measurement was
wrong, and what was served replaces it."""
WELL_KNOWN = 20
"""Rounds after which a cost is well known."""
SURE = 5
"""Rounds after which a shape's cost is known."""
HOPE = 0.6
"""What a cost that no round has shown yet may be of what it is taken to be."""
STALE_HOPE = 0.9
"""The same of a cost that was shown long ago."""
MEMORY = 2000
"""Rounds after which a third of what a shape showed is left: contexts grow and shrink meanwhile."""

Shape = tuple[int, int]
"""(rows a request, requests) of a captured graph."""
TREE, CHAIN, NARROW = 0, 1, 2
"""Forms of a round: trees, chains, trees from a narrow draft."""


@dataclass
class Costs:
    """Milliseconds a round; empty where vLLM captured no graphs."""

    rounds: dict[Shape, float] = field(default_factory=dict)
    """Target forward, logits and draft (no draft for one row), as measured at start."""
    chains: dict[Shape, float] = field(default_factory=dict)
    """The same of rounds that verify chains, where there are graphs for them."""
    narrow: dict[Shape, float] = field(default_factory=dict)
    """The same of trees from a narrow draft (proposer/reach.py), where there are such drafts."""
    _far: dict[tuple[Shape, int], list[float]] = field(default_factory=dict)
    """Rounds in a row that were far from the mean on one side, over the measured time."""
    _observed: dict[tuple[Shape, int], tuple[int, float, int]] = field(default_factory=dict)
    """Rounds seen, their mean time over the measured time, and when the last one was."""
    _near: dict[int, float] = field(default_factory=dict)
    """The latest such mean, by the power of two above the shape's tokens."""
    _latest: float = 1.0
    """The median of such means of the shapes served lately."""
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

    def round_ms(self, budget: int, num_reqs: int, form: int = TREE) -> float | None:
        """A round of `num_reqs` requests with `budget` nodes each; None if no graph serves it."""
        shape = self.shape(budget, num_reqs)
        ms = self._measured(shape, form)
        return None if shape is None or ms is None else ms * self._correction(shape, form)

    def _measured(self, shape: Shape | None, form: int) -> float | None:
        return None if shape is None else self.of(form).get(shape)

    def of(self, form: int) -> dict[Shape, float]:
        """The measured rounds of a form."""
        return (self.rounds, self.chains, self.narrow)[form]

    def observe(self, budget: int, num_reqs: int, ms: float, form: int = TREE) -> None:
        """A round took `ms`. A time that no round can take (a pause, a burst) is not counted."""
        shape = self.shape(budget, num_reqs)
        measured = self._measured(shape, form)
        if shape is None or measured is None or ms <= 0.0:
            return
        count, mean, weight = 0, self._correction(shape, form), 1.0
        if (shape, form) in self._observed:
            count, _, weight = self._remembered(shape, form)
        ratio = ms / measured
        far = FAR if count < WELL_KNOWN else VERY_FAR
        if believed := self._believed(shape, form, ratio, mean, far):
            count, mean = FAR_RUN, believed
            if not 1 / WRONG < believed < WRONG:
                self.of(form)[shape] = believed * measured
                mean = 1.0
        elif not 0.5 < ratio / mean < 4.0:
            return
        else:
            count = round(weight * count) + 1
            # The last step before a request ends comes late: no round alone moves the mean far.
            ratio = min(max(ratio, mean / FAR), mean * FAR)
            mean += (ratio - mean) / min(count, WINDOW)
        self._clock += 1
        self._observed[shape, form] = count, mean, self._clock
        self._near[_size(shape)] = mean
        since = self._clock - MEMORY // 2
        recent = (mean for _, mean, last in self._observed.values() if last > since)
        self._latest = statistics.median(recent)

    def _believed(
        self, shape: Shape, form: int, ratio: float, mean: float, limit: float
    ) -> float | None:
        """What the latest rounds agree on, if all of them were so far from the mean."""
        far = self._far.setdefault((shape, form), [])
        if not 1 / limit < ratio / mean < limit:
            if far and (far[0] > mean) != (ratio > mean):
                far.clear()
            far.append(ratio)
        else:
            far.clear()
        if len(far) < FAR_RUN:
            return None
        found = statistics.median(far)
        far.clear()
        return found

    def hopeful_ms(self, budget: int, num_reqs: int, form: int = TREE) -> float | None:
        """The least that such a round may take; None as above.

        A round that was never served takes no less than a smaller one that was.
        """
        shape = self.shape(budget, num_reqs)
        measured = self._measured(shape, form)
        if shape is None or measured is None:
            return None
        ms = measured * self._correction(shape, form)
        sure = self._sure(shape, form)
        if sure >= 0.1:
            return STALE_HOPE * ms if sure < 0.5 else ms
        if form == NARROW:
            return ms  # a draft of fewer masks may well be cheaper than one of fewer nodes
        smaller = [
            self.rounds[rows, n] * self._correction((rows, n), TREE)
            for (rows, n), other in self._observed
            if n == shape[1] and rows < shape[0] and other == TREE
        ]
        return min(ms, measured, max(smaller, default=HOPE * ms))

    def _sure(self, shape: Shape, form: int) -> float:
        """How well a cost is known: 1 from rounds served, 0 from the start alone."""
        if (shape, form) not in self._observed:
            return 0.0
        count, _, weight = self._remembered(shape, form)
        return weight * min(1.0, count / SURE)

    def _remembered(self, shape: Shape, form: int) -> tuple[int, float, float]:
        """Rounds observed, their mean, and the weight that is left of that by now."""
        count, mean, last = self._observed[shape, form]
        return count, mean, math.exp((last - self._clock) / MEMORY)

    def _correction(self, shape: Shape, form: int) -> float:
        """Observed over measured time, of this shape or else of one of about as many tokens."""
        if (shape, form) in self._observed:
            _, mean, weight = self._remembered(shape, form)
            return weight * mean + (1.0 - weight) * self._latest
        size = _size(shape)
        for near in (size, size - 1, size + 1):
            if near in self._near:
                return self._near[near]
        return 1.0


def _size(shape: Shape) -> int:
    return (shape[0] * shape[1] - 1).bit_length()


def lowered(times: dict[Shape, float]) -> dict[Shape, float]:
    """Times in which no shape costs more than one that has as many rows and requests, or more.

    What disturbs a measurement makes it longer. So the time of a larger shape bounds that of a
    smaller one from above.
    """
    return {
        (rows, n): min(ms for (r, m), ms in times.items() if r >= rows and m >= n)
        for rows, n in times
    }


def _round(runner: GPUModelRunner, rows: int, num_reqs: int, form: int) -> None:
    """One dummy round, with no live tree in it."""

    def ask(output: SchedulerOutput) -> None:
        ask_for_chains(output, form == CHAIN)
        ask_for_narrow(output, form == NARROW)

    state, logits = integration.dummy_step(runner, num_reqs, rows, ask)
    logits.argmax(-1)
    step = runner.model_state.runtime.step
    if rows > 1:
        # As after a verify step that accepted nothing.
        step.verified, step.has_plain_rows = True, False
    # Without drafts, the drafter's context alone.
    integration.dummy_draft(runner, state, rows - 1, num_drafts=rows - 1)


def measurable(shapes: Iterable[Shape], max_drafts: int) -> list[Shape]:
    """The shapes in order of tokens.

    Shapes of more requests than the draft's buffers hold are left out: vLLM never lets so many run
    (`max_num_active_seqs`).
    """
    fitting = {(rows, n) for rows, n in shapes if rows == 1 or n <= max_drafts}
    return sorted(fitting, key=lambda shape: (shape[0] * shape[1], shape))


def _time(runner: GPUModelRunner, rows: int, num_reqs: int, form: int) -> float:
    """Milliseconds of a dummy round."""
    for _ in range(WARM_UP):
        _round(runner, rows, num_reqs, form)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for i in range(REPEATS):
        _round(runner, rows, num_reqs, form)
        events[i + 1].record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in itertools.pairwise(events))


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
    most = runner.speculator.narrow.positions if runner.speculator.narrow else 0
    narrow = {(rows, n) for rows, n in shapes if 1 < rows <= most + 1}
    chains = {
        (desc.num_tokens // desc.num_reqs, desc.num_reqs)
        for desc in getattr(manager.graphs, "chains", {})
    }
    with integration.dummy_adapters(runner), integration.like_text(runner):
        for _ in range(PASSES):
            for shape in shapes:
                for form, having in ((TREE, shapes), (CHAIN, chains), (NARROW, narrow)):
                    if shape in having:
                        ms, times = _time(runner, *shape, form), costs.of(form)
                        times[shape] = min(ms, times.get(shape, ms))
    for form in (TREE, CHAIN, NARROW):
        costs.of(form).update(lowered(costs.of(form)))
    # Dummy rounds name indices of requests: leave no trees there, and no counts.
    runtime = runner.model_state.runtime
    runtime.trees.parents.fill_(-1)
    runtime.meter.reset()
    return costs
