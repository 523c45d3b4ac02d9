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
from vllm_ddtree.budget.cost import CHAIN, NARROW, TREE, Costs
from vllm_ddtree.budget.fit import StepTokens
from vllm_ddtree.budget.tiers import TIERS, chain_budget
from vllm_ddtree.budget.tries import (
    LEAST_PRICE,
    SAMPLE_ROUNDS,
    SAMPLE_SHARE,
    SAMPLE_STEPS,
    TIMING_SHARE,
    TIMING_STEPS,
    Tries,
)
from vllm_ddtree.round.marks import (
    ask_for_chains,
    ask_for_narrow,
    asks_for_chains,
    asks_for_narrow,
    note_choice,
)
from vllm_ddtree.round.meter import Reading, read_meter

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

logger = init_logger("vllm.ddtree")

READ_EVERY = 16
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
    narrow: bool = False
    """Whether they are drafted with few masks."""

    @property
    def form(self) -> int:
        """Of its rounds (cost.py)."""
        return NARROW if self.narrow else CHAIN if self.chain else TREE

    def __str__(self) -> str:
        if self.nodes == 0:
            return "plain decoding"
        if self.chain:
            return f"a chain of {self.nodes}"
        return f"trees of {self.nodes}" + (", drafted with few masks" if self.narrow else "")


PLAIN = Choice(0, False)
"""Nothing is drafted."""


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
        nodes = {rows - 1 for rows, _ in costs.narrow}
        self._choices += [Choice(budget, False, True) for budget in TIERS if budget in nodes]
        self._best_of: dict[int, Choice] = {}
        self._present: Choice | None = None
        self.tries = Tries()
        self._num_reqs = 0
        self._refreshed: float | None = None
        # What choices follow: tokens a round, and costs. With several schedulers these are the
        # first rank's, as they were at the last refresh; else they are the live ones.
        self._tokens: dict[Choice, float] = {}
        self._at_most: dict[Choice, float] = {}  # tokens of choices that are not known yet
        self._known = False  # whether tokens were seen, not only guessed
        self._costs = costs
        self.refresh(0.0)
        self._refreshed = None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, num_reqs: int) -> int:
        return self.wanted(num_reqs).nodes

    def wanted(self, num_reqs: int) -> Choice:
        """What a step of `num_reqs` requests drafts: the best choice, or the one that is tried."""
        self._num_reqs = num_reqs
        self._present = best = self.choice(num_reqs)
        tried = self.tries.choice
        return tried if tried is not None and tried in self._rates(num_reqs) else best

    def choice(self, num_reqs: int) -> Choice:
        """The best budget, as trees or as a chain, at `num_reqs` running requests."""
        if num_reqs not in self._best_of:
            self._best_of[num_reqs] = self._best(num_reqs, self._present)
        return self._best_of[num_reqs]

    def refresh(self, now: float) -> float:
        """Choose anew for every number of running requests, each when it is asked for.

        Args:
            now: this rank's time in seconds.

        Returns:
            The time that all ranks take for now.

        """
        for each in self._choices:
            if each.narrow:
                likely, most = self.acceptance.narrow(each.nodes)
            else:
                likely = most = self.acceptance.expected(each.nodes, each.chain)
            self._tokens[each], self._at_most[each] = 1 + likely, 1 + most
        self._known = self.acceptance.known
        if self._agree is not None:
            # A copy: the first rank's live costs go on from here, its choices must not.
            seen = self._tokens, self._at_most, self._known, copy.deepcopy(self.costs), now
            agreed = self._agree(seen)
            self._tokens, self._at_most, self._known, self._costs, now = agreed
        self._best_of.clear()
        if self._refreshed is not None:
            self.tries.earn(now - self._refreshed)
        self._refreshed = now
        if self._num_reqs:
            self._try(self._num_reqs)
        return now

    def _rates(self, num_reqs: int) -> dict[Choice, float]:
        """Expected tokens a millisecond of one request, of the choices that have a graph."""
        most = self._step_tokens.largest(num_reqs) if self._step_tokens else max(TIERS)
        rates = {}
        for choice in self._choices:
            ms = self._costs.round_ms(choice.nodes, num_reqs, choice.form)
            if ms is not None and choice.nodes <= most:
                rates[choice] = self._tokens[choice] / ms
        return rates

    def _best(self, num_reqs: int, present: Choice | None) -> Choice:
        """Most expected tokens a millisecond; what is chosen at present, if that is as good."""
        if num_reqs == 0:
            return PLAIN
        rates = self._rates(num_reqs)
        if not rates:
            # No graph holds so many requests: the largest batch with one is the guide.
            guide = self._best(max(n for _, n in self._costs.rounds), present)
            most = self._step_tokens.largest(num_reqs) if self._step_tokens else max(TIERS)
            return guide if guide.nodes <= most else PLAIN
        best = max(rates, key=lambda choice: rates[choice])
        if present in rates and rates[best] < MARGIN * rates[present]:
            return present
        return best

    def _try(self, num_reqs: int) -> None:
        """Begin a try, if something could be better than the best and the try can be paid."""
        rates, present = self._rates(num_reqs), self.choice(num_reqs)
        others = {choice: own for choice, own in rates.items() if choice != present}
        if present not in rates or not others:
            return

        def price(tried: Choice, tokens: float) -> float:
            """Milliseconds that a round is expected to lose; no round is a gift."""
            ms = self._costs.round_ms(tried.nodes, num_reqs, tried.form)
            assert ms is not None  # it has a rate
            return max(ms - tokens / rates[present], LEAST_PRICE * ms)

        if present == PLAIN:
            steps = min(SAMPLE_STEPS, -(-SAMPLE_ROUNDS // num_reqs))
            tried = max(others, key=lambda choice: others[choice])
            # It must be paid even if nothing is accepted.
            self.tries.start(tried, SAMPLE_SHARE, steps, steps * price(tried, 1.0))
            if not self._known:
                return  # what drafts cost does not matter yet
        hoped = {
            choice: self._at_most[choice] / ms
            for choice in others
            if (ms := self._costs.hopeful_ms(choice.nodes, num_reqs, choice.form))
        }
        for tried in sorted(hoped, key=lambda choice: -hoped[choice]):  # a cheap one, meanwhile
            ms = TIMING_STEPS * price(tried, self._tokens[tried])
            if hoped[tried] > MARGIN * rates[present] and self.tries.start(
                tried, TIMING_SHARE, TIMING_STEPS, ms
            ):
                return

    def ranges(self) -> list[tuple[int, int, int | str]]:
        """(first, last, budget), as in `budget_per_batch_size`; "chain of n" for chains.

        It does not say how the nodes are drafted.
        """
        found: list[tuple[int, int, int | str]] = []
        best = [self._best(1, None)]
        for num_reqs in range(2, self._size):  # each as if one request more had just come
            best.append(self._best(num_reqs, best[-1]))
        for (budget, chain), group in itertools.groupby(
            range(1, self._size), key=lambda num_reqs: best[num_reqs - 1][:2]
        ):
            members = list(group)
            found.append((members[0], members[-1], f"chain of {budget}" if chain else budget))
        return found

    def words(self) -> str:
        """What is chosen for the requests that run, and why."""
        num_reqs = self._num_reqs
        rates, best = self._rates(num_reqs), self.choice(num_reqs)
        if best not in rates:
            return f"{num_reqs} requests: {best}, as no CUDA graph holds so many"
        ms = self._costs.round_ms(best.nodes, num_reqs, best.form)
        said = f"{num_reqs} requests: {best}, {self._tokens[best]:.2f} tokens in {ms:.2f} ms"
        others = {choice: rate for choice, rate in rates.items() if choice != best}
        if others:
            second = max(others, key=lambda choice: others[choice])
            said += f"; {second} would give {others[second] / rates[best]:.2f} of that"
        if best != PLAIN and PLAIN in others and second != PLAIN:
            said += f", plain decoding {others[PLAIN] / rates[best]:.2f}"
        return said


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
        self._like: Round | None = None  # what the step before was
        self._run = 0  # steps like it in a row
        self._drafted: Choice | None = None  # what the step before had to draft
        self._answer: Future[list[Reading]] | None = None
        self._said = (0.0, auto.ranges())
        self._tries_said = (0, 0.0)

    def scheduled(self, scheduler_output: SchedulerOutput) -> None:
        """A step is about to run: mark it as one of trees or one of chains, and how it drafts."""
        lengths = scheduler_output.num_scheduled_tokens
        if len(lengths) > 0:
            rows, chain = max(lengths.values()), False
            if rows == min(lengths.values()):
                drafted = self._drafted or self.auto.choice(len(lengths))
                chain = drafted[:2] == (rows - 1, True)
            ask_for_chains(scheduler_output, chain)
            self._drafted = self.auto.wanted(len(lengths))
            ask_for_narrow(scheduler_output, self._drafted.narrow)
            tried = self._drafted != self.auto.choice(len(lengths))
            note_choice(scheduler_output, tried, self._drafted == PLAIN)
            self.auto.tries.step()

    def step(self, scheduler_output: SchedulerOutput, now: float) -> None:
        """A step's output has come, at `now` seconds.

        Equal steps follow one another without a pause. So the time since the step before is the
        step's own time.
        """
        like = _round_of(scheduler_output)
        self._run = self._run + 1 if like is not None and like == self._like else 0
        if self._run >= STEADY and like is not None:
            self.auto.costs.observe(like.nodes, like.num_reqs, 1e3 * (now - self._last), like.form)
        self._last, self._like = now, like
        self._steps += 1
        if self._steps % READ_EVERY == 0:
            self._answer = self._executor.collective_rpc(read_meter, non_block=True)
        elif self._answer is not None and self._steps % READ_EVERY == READ_AFTER:
            # All ranks hold the same trees.
            self.auto.acceptance.update(self._answer.result()[0], now)
            self._answer = None
            self._say(self.auto.refresh(now))

    def _say(self, now: float) -> None:
        """In the log, at most once a minute: the schedule, when it has changed, and why."""
        said_at, said = self._said
        if now - said_at < SAY_EVERY:
            return
        ranges, tries = self.auto.ranges(), self.auto.tries
        if ranges != said:
            logger.info("ddtree: budget=auto now %s (first, last request, nodes)", ranges)
            count, ms = self._tries_said
            logger.info(
                "ddtree: %s; tries of other budgets: %d, %.1f %% of the time",
                self.auto.words(),
                tries.count - count,
                0.1 * (tries.spent_ms - ms) / (now - said_at) if said_at else 0.0,
            )
        self._said, self._tries_said = (now, ranges), (tries.count, tries.spent_ms)


class Round(NamedTuple):
    """A step all of whose requests verify alike, and draft what they verify."""

    nodes: int
    num_reqs: int
    form: int
    """As in cost.py."""


def _round_of(scheduler_output: SchedulerOutput) -> Round | None:
    """What a step is; None unless all its requests verify alike, and draft as many nodes."""
    lengths = scheduler_output.num_scheduled_tokens
    if not lengths:
        return None
    rows = max(lengths.values())
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if min(lengths.values()) < rows or (rows > 1 and len(drafts) < len(lengths)):
        return None
    if getattr(scheduler_output, "num_spec_tokens_to_schedule", rows - 1) != rows - 1:
        return None
    narrow, chain = asks_for_narrow(scheduler_output), asks_for_chains(scheduler_output)
    if narrow and chain:
        return None  # a change of both
    return Round(rows - 1, len(lengths), NARROW if narrow else CHAIN if chain else TREE)


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
            times.append((f"chain of {chain}", costs.round_ms(chain, num_reqs, CHAIN)))
        narrow = [(budget, costs.round_ms(budget, num_reqs, NARROW)) for budget in reversed(TIERS)]
        times += [(f"{budget} with few masks", ms) for budget, ms in narrow]
        words = ", ".join(f"{budget} {ms:.2f}" for budget, ms in times if ms is not None)
        logger.info("ddtree: %d requests, ms a round by budget: %s", num_reqs, words or "no graph")
    logger.info("ddtree: budget=auto starts with %s (first, last request, nodes)", auto.ranges())
    return lambda scheduler_output, _: watch.step(scheduler_output, time.perf_counter())
