# SPDX-License-Identifier: Apache-2.0
"""The counts in the front-end's process: Prometheus counters, and more words in vLLM's log line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats

from vllm_ddtree.metrics.rounds import RoundCounts
from vllm_ddtree.metrics.scheduler import take_counts
from vllm_ddtree.round.kinds import LABELS

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig
    from vllm.v1.metrics.loggers import StatLoggerBase
    from vllm.v1.metrics.stats import SchedulerStats

PREFIX = "vllm:ddtree_"
RANKS_IN_LOG = 4


def max_depth(speculative_config: SpeculativeConfig) -> int:
    """The deepest node that a tree can have."""
    return speculative_config.max_depth


class TreeProm:
    """Prometheus counters and the budget's gauge, by engine.

    Args:
        prometheus: vLLM's logger, for its classes and labels.
        depth: deepest node.
        top_k: candidates a draft position.

    """

    def __init__(self, prometheus: PrometheusStatLogger, depth: int, top_k: int) -> None:
        self._engines = prometheus.per_engine_labelvalues
        names = ["model_name", "engine"]

        def counter(name: str, text: str, *labels: str) -> Any:
            return prometheus._counter_cls(
                name=PREFIX + name, documentation=text, labelnames=[*names, *labels]
            )

        nodes = counter("nodes_drafted", "Tree nodes that were verified.")
        rounds = counter(
            "rounds", "Rounds of requests by form (tree, chain, none) and reason.", "form", "reason"
        )
        depths = counter("accepted_per_depth", "Accepted nodes by depth, from 1.", "depth")
        ranks = counter(
            "accepted_per_rank",
            "Accepted nodes by rank among their draft position's candidates, best is 0.",
            "rank",
        )
        tries = counter(
            "tries", "Steps that drafted another budget than the best one, to learn what it gives."
        )
        budget = prometheus._gauge_cls(
            name=PREFIX + "budget",
            documentation="Nodes to draft a request, in the latest step.",
            labelnames=names,
            multiprocess_mode="mostrecent",
        )
        self._nodes, self._budget, self._tries, self._by_label = {}, {}, {}, {}
        for engine, values in self._engines.items():
            self._nodes[engine] = nodes.labels(*values)
            self._budget[engine] = budget.labels(*values)
            self._tries[engine] = tries.labels(*values)
            self._by_label[engine] = (
                [rounds.labels(*values, *LABELS[kind]) for kind in sorted(LABELS)],
                [depths.labels(*values, str(at)) for at in range(1, depth + 1)],
                [ranks.labels(*values, str(rank)) for rank in range(top_k)],
            )

    def observe(self, stats: SpecDecodingStats, counts: RoundCounts, engine: int) -> None:
        """Add a step's counts."""
        if engine not in self._engines:
            return
        self._nodes[engine].inc(counts.nodes)
        self._budget[engine].set(counts.budget)
        self._tries[engine].inc(counts.tries)
        found = (counts.rounds, stats.num_accepted_tokens_per_pos, counts.ranks)
        for counters, numbers in zip(self._by_label[engine], found, strict=True):
            # vLLM has a position for every node; none beyond the depth is ever reached.
            for counter, number in zip(counters, numbers, strict=False):
                if number:
                    counter.inc(number)


class TreeLogging(SpecDecodingLogging):
    """vLLM's periodic line, its rates by depth, and what the trees did.

    Args:
        depth: deepest node.
        top_k: candidates a draft position.

    """

    def __init__(self, depth: int, top_k: int) -> None:
        self._depth, self._top_k = depth, top_k
        super().__init__()

    def reset(self) -> None:
        """Count from nothing."""
        super().reset()
        self._counts = RoundCounts.none(self._top_k)

    def observe(self, spec_decoding_stats: SpecDecodingStats) -> None:
        """Add a step's counts."""
        super().observe(spec_decoding_stats)
        self.accepted_tokens_per_pos_lists[-1] = self.accepted_tokens_per_pos_lists[-1][
            : self._depth
        ]
        counts = getattr(spec_decoding_stats, "ddtree_counts", None)
        if counts is not None:
            self._counts.add(counts)

    def log(self, log_fn: Callable[..., None] | None = None) -> None:
        """Say what happened since the last time, unless nothing did."""
        assert log_fn is not None  # as LoggingStatLogger calls it
        words = self._words()
        if sum(self.num_drafts):
            super().log(log_fn=lambda line, *args: log_fn(line + ", %s", *args, words))
        elif self.num_drafts:
            log_fn("SpecDecoding metrics: %s", words)
            self.reset()

    def _words(self) -> str:
        counts = self._counts
        rounds = {LABELS[kind]: counts.rounds[kind] for kind in sorted(LABELS)}
        parts = [
            f"{number} {form} ({reason})" if reason else f"{number} {form}"
            for (form, reason), number in rounds.items()
            if number
        ]
        words = f"Budget: {counts.budget}, Rounds: {', '.join(parts)}"
        if counts.tries:
            words += f", Tries: {counts.tries}"
        if accepted := sum(counts.ranks):
            shares = [number / accepted for number in counts.ranks]
            ranks = ", ".join(f"{share:.3f}" for share in shares[:RANKS_IN_LOG])
            words += f", Accepted by rank: {ranks}, beyond {sum(shares[RANKS_IN_LOG:]):.3f}"
        return words


class TreeMetrics:
    """What a front-end's loggers do beside vLLM's own.

    Args:
        loggers: vLLM's StatLoggerManager.stat_loggers.
        speculative_config: a DDTreeConfig.

    """

    def __init__(
        self, loggers: list[StatLoggerBase], speculative_config: SpeculativeConfig
    ) -> None:
        depth, top_k = max_depth(speculative_config), speculative_config.top_k
        self._proms = []
        for logger in loggers:
            if isinstance(logger, PrometheusStatLogger):
                self._proms.append(TreeProm(logger, depth, top_k))
            single = getattr(logger, "per_engine_stat_loggers", {})
            for each in (logger, *single.values()):
                if isinstance(each, LoggingStatLogger):
                    each.spec_decoding_logging = TreeLogging(depth, top_k)

    def record(self, scheduler_stats: SchedulerStats | None, engine: int | None) -> None:
        """A step's statistics have come, before any logger sees them."""
        stats = scheduler_stats.spec_decoding_stats if scheduler_stats is not None else None
        counts = take_counts(stats) if stats is not None else None
        if stats is None or counts is None:
            return
        stats.ddtree_counts = counts  # for the log
        for prom in self._proms:
            prom.observe(stats, counts, engine or 0)
