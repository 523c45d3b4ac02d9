# SPDX-License-Identifier: Apache-2.0
"""The budget that gives most tokens a second at a number of running requests.

A round of a budget gives 1 + its expected accepted nodes (`acceptance.py`) tokens and takes a
measured time (`cost.py`). Both follow what the server's own requests show.
"""

from __future__ import annotations

import copy
import itertools
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger

from vllm_ddtree import integration
from vllm_ddtree.budget.acceptance import Acceptance
from vllm_ddtree.budget.agree import Agree, agreement
from vllm_ddtree.budget.cost import Costs
from vllm_ddtree.budget.fit import StepTokens
from vllm_ddtree.budget.tiers import TIERS, chain_budget
from vllm_ddtree.round.marks import ask_for_chains, asks_for_chains
from vllm_ddtree.round.meter import Reading, read_meter

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

logger = init_logger("vllm.ddtree")

READ_EVERY = 32
"""Steps between two looks at the meter."""
READ_AFTER = 4
"""Steps until the meter's answer is taken. By then every call before it has been answered, so
taking it waits for nothing."""
STEADY = 2
"""Equal steps that come before one whose time counts. When requests come and go, the host's work
shows in a step's time, and outputs come in bunches."""
MARGIN = 1.02
"""Only a budget that is better by this factor replaces another one: noise does not switch it."""
SAY_EVERY = 60.0
"""Seconds between two log lines about the schedule."""


class Choice(NamedTuple):
    """What a request drafts and how it is verified."""

    nodes: int
    chain: bool
    """Whether the nodes are verified as a chain."""


class AutoBudget:
    """vLLM's `dynamic_sd_lookup` (v1/core/sched/scheduler.py): running requests -> nodes to draft.

    Args:
        costs: measured rounds.
        max_num_seqs: most running requests.
        max_depth: deepest node of a tree.
        tokens: of a step, which must have rows for all running requests; None: no limit.
        agree: how several schedulers choose alike; None: there is one.

    """

    def __init__(
        self,
        costs: Costs,
        max_num_seqs: int,
        max_depth: int = 255,
        tokens: StepTokens | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.costs = costs
        self.acceptance = Acceptance(max_depth)
        self._size = max_num_seqs + 1
        self._step_tokens = tokens
        self._agree = agree
        self._choices: list[Choice] = [Choice(budget, False) for budget in TIERS]
        if (chain := chain_budget(max_depth)) is not None:
            self._choices.append(Choice(chain, True))
        self._chosen: dict[int, Choice] = {}
        self._fresh: set[int] = set()
        # What choices follow: tokens a round, and costs. With several schedulers these are the
        # first rank's, as they were at the last refresh; else they are the live ones.
        self._tokens: dict[Choice, float] = {}
        self._costs = costs
        self.refresh(0.0)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, num_reqs: int) -> int:
        return self.choice(num_reqs)[0]

    def choice(self, num_reqs: int) -> Choice:
        """The best budget, as trees or as a chain, at `num_reqs` running requests."""
        if num_reqs not in self._fresh:
            self._chosen[num_reqs] = self._best(num_reqs)
            self._fresh.add(num_reqs)
        return self._chosen[num_reqs]

    def refresh(self, now: float) -> float:
        """Choose anew for every number of running requests, each when it is asked for.

        Args:
            now: this rank's time in seconds.

        Returns:
            The time that all ranks take for now.

        """
        self._tokens = {each: 1 + self.acceptance.expected(*each) for each in self._choices}
        if self._agree is not None:
            # A copy: the first rank's live costs go on from here, its choices must not.
            seen = self._tokens, copy.deepcopy(self.costs), now
            self._tokens, self._costs, now = self._agree(seen)
        self._fresh.clear()
        return now

    def _best(self, num_reqs: int) -> Choice:
        """Most expected tokens a millisecond; what was chosen before, if that is as good."""
        if num_reqs == 0:
            return Choice(0, False)
        rates = {}
        most = self._step_tokens.largest(num_reqs) if self._step_tokens else max(TIERS)
        for choice in self._choices:
            ms = self._costs.round_ms(choice.nodes, num_reqs, choice.chain)
            if ms is not None and choice.nodes <= most:
                rates[choice] = self._tokens[choice] / ms
        if not rates:
            # No graph holds so many requests: the largest batch with one is the guide.
            guide = self.choice(max(n for _, n in self._costs.rounds))
            return guide if guide.nodes <= most else Choice(0, False)
        best = max(rates, key=lambda choice: rates[choice])
        present = self._chosen.get(num_reqs)
        if present in rates and rates[best] < MARGIN * rates[present]:
            return present
        return best

    def ranges(self) -> list[tuple[int, int, int | str]]:
        """(first, last, budget), as in `budget_per_batch_size`; "chain of n" for chains."""
        found: list[tuple[int, int, int | str]] = []
        for (budget, chain), group in itertools.groupby(range(1, self._size), key=self.choice):
            members = list(group)
            found.append((members[0], members[-1], f"chain of {budget}" if chain else budget))
        return found


class Watch:
    """Feeds an `AutoBudget` from the steps of an engine's scheduler.

    Args:
        auto: the choice of budgets.
        executor: vLLM's executor, whose workers keep the meters.

    """

    def __init__(self, auto: AutoBudget, executor: Executor) -> None:
        self.auto = auto
        self._executor = executor
        self._steps = 0
        self._last = 0.0
        self._like: tuple[int, int, bool] | None = None  # what the step before was
        self._run = 0  # steps like it in a row
        self._answer: Future[list[Reading]] | None = None
        self._said = (0.0, auto.ranges())

    def scheduled(self, scheduler_output: SchedulerOutput) -> None:
        """A step is about to run: mark it as one of trees or one of chains."""
        lengths = scheduler_output.num_scheduled_tokens
        if len(lengths) > 0:
            rows, chain = max(lengths.values()), False
            if rows == min(lengths.values()):
                chain = self.auto.choice(len(lengths)) == (rows - 1, True)
            ask_for_chains(scheduler_output, chain)

    def step(self, scheduler_output: SchedulerOutput, now: float) -> None:
        """A step's output has come, at `now` seconds.

        Equal steps follow one another without a pause. So the time since the step before is the
        step's own time.
        """
        like = _round_of(scheduler_output)
        self._run = self._run + 1 if like is not None and like == self._like else 0
        if self._run >= STEADY and like is not None:
            self.auto.costs.observe(like[0], like[1], 1e3 * (now - self._last), like[2])
        self._last, self._like = now, like
        self._steps += 1
        if self._steps % READ_EVERY == 0:
            self._answer = self._executor.collective_rpc(read_meter, non_block=True)
        elif self._answer is not None and self._steps % READ_EVERY == READ_AFTER:
            # All ranks hold the same trees.
            self.auto.acceptance.update(self._answer.result()[0])
            self._answer = None
            self._say(self.auto.refresh(now))

    def _say(self, now: float) -> None:
        """The schedule in the log, when it has changed, at most once a minute."""
        said_at, said = self._said
        if now - said_at < SAY_EVERY:
            return
        ranges = self.auto.ranges()
        if ranges != said:
            logger.info("ddtree: budget=auto now %s (first, last request, nodes)", ranges)
        self._said = now, ranges


def _round_of(scheduler_output: SchedulerOutput) -> tuple[int, int, bool] | None:
    """(nodes, requests, whether as chains) of a step; None unless all requests verify alike."""
    lengths = scheduler_output.num_scheduled_tokens
    if not lengths:
        return None
    rows = max(lengths.values())
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if min(lengths.values()) < rows or (rows > 1 and len(drafts) < len(lengths)):
        return None
    return rows - 1, len(lengths), asks_for_chains(scheduler_output)


def attach(engine_core: EngineCore, costs: Costs) -> integration.Observer | None:
    """Let a scheduler choose its budgets, and log what was measured.

    Args:
        engine_core: vLLM's EngineCore, ready to serve.
        costs: measured by this scheduler's first worker.

    Returns:
        An observer by which the choice follows the steps; None without graphs.

    """
    scheduler, config = engine_core.scheduler, engine_core.vllm_config
    spec = config.speculative_config
    if not costs.rounds:
        logger.info(
            "ddtree: no CUDA graphs to measure; budget=auto keeps %s (first, last request, nodes)",
            spec.num_speculative_tokens_per_batch_size,
        )
        return None
    auto = AutoBudget(
        costs,
        config.scheduler_config.max_num_seqs,
        spec.max_depth,
        StepTokens.of(config),
        agreement(engine_core.model_executor),
    )
    watch = Watch(auto, engine_core.model_executor)
    integration.follow(scheduler).scheduled.append(watch.scheduled)
    scheduler.dynamic_sd_lookup = auto
    chain = chain_budget(spec.max_depth)
    for num_reqs in (1, 8, 32, 128):
        times = [(str(budget), costs.round_ms(budget, num_reqs)) for budget in reversed(TIERS)]
        if chain is not None:
            times.append((f"chain of {chain}", costs.round_ms(chain, num_reqs, chain=True)))
        words = ", ".join(f"{budget} {ms:.2f}" for budget, ms in times if ms is not None)
        logger.info("ddtree: %d requests, ms a round by budget: %s", num_reqs, words or "no graph")
    logger.info("ddtree: budget=auto starts with %s (first, last request, nodes)", auto.ranges())
    return lambda scheduler_output, _: watch.step(scheduler_output, time.perf_counter())
