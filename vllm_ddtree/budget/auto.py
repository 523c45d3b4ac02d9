# SPDX-License-Identifier: Apache-2.0
"""The budget that gives most tokens a second at a number of running requests.

Tokens a round are 1 + the accepted nodes expected of a budget; milliseconds a round are measured at
start (`cost.py`). Expected acceptance starts from a prior and follows what the server's own
requests accept.
"""

from typing import Any

from vllm.logger import init_logger

from vllm_ddtree.budget.cost import Costs

logger = init_logger("vllm.ddtree")

TIERS = (63, 31, 15, 7, 3, 0)
"""Budgets to choose from; vLLM captures graphs for each."""
SCHEDULE = [(1, 2, 63), (3, 8, 31), (9, 16, 15), (17, 64, 7), (65, 128, 3), (129, 4096, 0)]
"""(first, last running request, budget) until the machine has been measured."""
PRIOR = {0: 0.0, 3: 1.6, 7: 2.2, 15: 2.6, 31: 3.0, 63: 3.25}
"""Accepted nodes before anything is known: a middling drafter, in the proportions that the trained
pairs of different strength have in common."""
WINDOW = 2000
"""Rounds (of one request) over which acceptance is averaged."""
REFRESH = 200
"""Rounds between two looks at the schedule."""
MARGIN = 1.03
"""A budget gives way only to one that is better by this factor, so that noise does not switch
it."""


class Acceptance:
    """Accepted nodes expected of each budget: what was seen there, else the prior scaled by what
    was seen elsewhere."""

    def __init__(self) -> None:
        self.mean: dict[int, float] = {}
        self.weight: dict[int, float] = {}

    def observe(self, budget: int, accepted: int) -> None:
        """One round of one request."""
        if budget not in PRIOR or budget == 0:
            return
        weight = self.weight.get(budget, 0.0) + 1.0
        mean = self.mean.get(budget, 0.0)
        self.mean[budget] = mean + (accepted - mean) / min(weight, WINDOW)
        self.weight[budget] = min(weight, WINDOW)

    def expected(self, budget: int) -> float:
        """Accepted nodes a round, never more than the budget."""
        seen = sum(self.weight[b] * self.mean[b] for b in self.mean)
        prior = sum(self.weight[b] * PRIOR[b] for b in self.mean)
        # The prior itself counts as some rounds, so that the first few do not decide.
        scale = (seen + 50 * PRIOR[31]) / (prior + 50 * PRIOR[31])
        guess = PRIOR[budget] * scale
        weight = self.weight.get(budget, 0.0)
        own = self.mean.get(budget, 0.0)
        return min(float(budget), (own * weight + guess * 50) / (weight + 50))


class AutoBudget:
    """vLLM's `dynamic_sd_lookup` (v1/core/sched/scheduler.py): running requests -> nodes to draft.

    Args:
        costs: measured rounds.
        max_num_seqs: most running requests.

    """

    def __init__(self, costs: Costs, max_num_seqs: int) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        self.budgets = [0] * (max_num_seqs + 1)
        self._rounds = 0
        self.refresh()

    def __len__(self) -> int:
        return len(self.budgets)

    def __getitem__(self, num_reqs: int) -> int:
        return self.budgets[num_reqs]

    def observe(self, budget: int, accepted: int) -> None:
        """One verified round of one request."""
        self.acceptance.observe(budget, accepted)
        self._rounds += 1
        if self._rounds % REFRESH == 0:
            self.refresh()

    def refresh(self) -> None:
        """Choose anew for every number of running requests."""
        tokens = {budget: 1 + self.acceptance.expected(budget) for budget in TIERS}
        for num_reqs in range(1, len(self.budgets)):
            self.budgets[num_reqs] = self._best(num_reqs, tokens)

    def _best(self, num_reqs: int, tokens: dict[int, float]) -> int:
        rates = {}
        for budget in TIERS:
            ms = self.costs.round_ms(budget, num_reqs)
            if ms is not None:
                rates[budget] = tokens[budget] / ms
        if not rates:
            # Beyond every graph the widest batch with one is the guide.
            return self.budgets[num_reqs - 1] if num_reqs > 1 else TIERS[1]
        best = max(rates, key=lambda budget: rates[budget])
        present = self.budgets[num_reqs]
        if self._rounds and present in rates and rates[best] < MARGIN * rates[present]:
            return present
        return best

    def ranges(self) -> list[tuple[int, int, int]]:
        """(first, last, budget), as `budget_per_batch_size` has it."""
        found: list[tuple[int, int, int]] = []
        for num_reqs in range(1, len(self.budgets)):
            budget = self.budgets[num_reqs]
            if found and found[-1][2] == budget:
                found[-1] = (found[-1][0], num_reqs, budget)
            else:
                found.append((num_reqs, num_reqs, budget))
        return found


def attach(engine_core: Any, costs: Costs) -> None:
    """Let a scheduler choose its budgets, and say what was measured.

    Args:
        engine_core: vLLM's EngineCore, ready to serve.
        costs: measured by the workers; the first rank's.

    """
    scheduler = engine_core.scheduler
    if not costs.rounds:
        logger.warning(
            "ddtree: no CUDA graphs to measure; budget=auto keeps %s (first, last request, nodes)",
            engine_core.vllm_config.speculative_config.num_speculative_tokens_per_batch_size,
        )
        return
    auto = AutoBudget(costs, engine_core.vllm_config.scheduler_config.max_num_seqs)
    counted = scheduler.make_spec_decoding_stats

    def make_spec_decoding_stats(
        stats: Any, num_draft_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        accepted = kwargs["num_accepted_tokens"] if "num_accepted_tokens" in kwargs else args[0]
        auto.observe(num_draft_tokens, accepted)
        return counted(stats, num_draft_tokens, *args, **kwargs)

    scheduler.make_spec_decoding_stats = make_spec_decoding_stats
    scheduler.dynamic_sd_lookup = auto
    for rows, num_reqs in ((b + 1, n) for b in TIERS for n in (1, 8, 32)):
        ms = costs.round_ms(rows - 1, num_reqs)
        if ms is not None:
            logger.info("ddtree: %d requests, budget %d: %.2f ms a round", num_reqs, rows - 1, ms)
    logger.info("ddtree: budget=auto starts with %s (first, last request, nodes)", auto.ranges())
