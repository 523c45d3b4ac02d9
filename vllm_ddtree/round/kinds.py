# SPDX-License-Identifier: Apache-2.0
"""How each request of a step verifies: a tree, a chain, or nothing, and why."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class RoundKind(IntEnum):
    """How a request verified in a round, and why."""

    TREE = 0
    PARAMETERS = 1
    PROCESSORS = 2
    MIXED = 3
    ONE_NODE = 4
    BUDGET_0 = 5
    NO_DRAFTS = 6
    CHOSEN = 7
    REFUSED = 8
    PLAIN_FASTER = 9
    LEFT_OUT = 10


LABELS: dict[RoundKind, tuple[str, str]] = {
    RoundKind.TREE: ("tree", ""),
    RoundKind.PARAMETERS: ("chain", "sampling parameters"),
    RoundKind.PROCESSORS: ("chain", "logits processors"),
    RoundKind.MIXED: ("chain", "mixed step"),
    RoundKind.ONE_NODE: ("chain", "one node"),
    RoundKind.BUDGET_0: ("none", "budget 0"),
    RoundKind.NO_DRAFTS: ("none", "no drafts"),
    RoundKind.CHOSEN: ("chain", "faster"),
    RoundKind.REFUSED: ("none", "drafts refused"),
    RoundKind.PLAIN_FASTER: ("none", "plain decoding is faster"),
    RoundKind.LEFT_OUT: ("none", "better nodes elsewhere"),
}
"""(form, reason) of the metrics' labels."""


@dataclass
class StepKinds:
    """How the requests of a step verify, as far as the host knows."""

    chain_only: np.ndarray
    """int32 [num_reqs], not 0 where a request's sampling needs a chain."""
    asked: RoundKind
    """The kind of the requests whose sampling needs a chain."""
    others: RoundKind
    """The kind of the other requests."""


def step_kinds(chain_only: np.ndarray, by_processors: bool, others: RoundKind) -> StepKinds:
    """Kinds of a step's requests.

    Args:
        chain_only: int32 [num_reqs], as in `StepKinds`.
        by_processors: whether the engine's logits processors, not a request's own parameters, are
            why all requests verify chains.
        others: as in `StepKinds`.

    """
    asked = RoundKind.PROCESSORS if by_processors else RoundKind.PARAMETERS
    return StepKinds(chain_only, asked, others)
