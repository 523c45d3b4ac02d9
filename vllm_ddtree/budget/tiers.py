# SPDX-License-Identifier: Apache-2.0
"""The budgets of `"budget": "auto"`."""

TIERS = (63, 31, 23, 15, 11, 7, 5, 3, 1, 0)
"""Budgets to choose from; vLLM captures graphs for each."""
CHAINS = (15, 7)
"""Budgets that may also be verified as a chain, by the backend's own causal attention. An engine
has the largest one that its drafter reaches, and no other, because graphs take memory."""
SCHEDULE = [(1, 2, 63), (3, 8, 31), (9, 16, 15), (17, 64, 7), (65, 128, 3), (129, 4096, 0)]
"""(first, last running request, budget) until the machine has been measured."""


def chain_budget(max_depth: int) -> int | None:
    """Nodes of the chain beside the trees of a drafter that reaches `max_depth`; None: no chain."""
    return next((budget for budget in CHAINS if budget <= max_depth), None)
