# SPDX-License-Identifier: Apache-2.0
"""A step's rows are classified right, and its trees become chains when they should."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_ddtree.round import plan
from vllm_ddtree.round.kinds import RoundKind
from vllm_ddtree.round.plan import mixed_tree_tokens, plan_shared_step, plan_step
from vllm_ddtree.round.step import Step

# (rows, logits) of each request
TREES = [(8, 8), (8, 8)]
MIXED = [(100, 1), (8, 8), (1, 1)]
ROWS_BEFORE = [(20, 4), (8, 8)]
DECODE = [(1, 1), (1, 1)]
PREFILL = [(40, 1)]
ONE_NODE = [(2, 2), (2, 2)]


def planned(
    requests: list[tuple[int, int]],
    from_tokens: float = 0,
    asked: bool = False,
    graph: bool = False,
) -> Step:
    rows, logits = np.array(requests).T
    return plan_step(rows, logits, int(rows.sum()), from_tokens, asked, graph)


@pytest.mark.parametrize(
    ("requests", "has_trees", "plain", "longest", "tree_rows"),
    [
        (TREES, True, False, 8, 16),
        (MIXED, True, True, 8, 8),
        (ROWS_BEFORE, True, True, 20, 12),
        (DECODE, False, True, 0, 0),
        (PREFILL, False, True, 0, 0),
        (ONE_NODE, False, False, 2, 4),
    ],
    ids=["trees", "mixed", "rows before a tree", "decode", "prefill", "one node"],
)
def test_rows(
    requests: list[tuple[int, int]], has_trees: bool, plain: bool, longest: int, tree_rows: int
) -> None:
    step = planned(requests)
    assert (step.has_trees, step.has_plain_rows) == (has_trees, plain)
    assert (step.max_verify_len, step.num_tree_rows) == (longest, tree_rows)
    assert not step.as_chains and step.kind == RoundKind.TREE
    assert not step.in_graph and not step.verified and step.kinds is None


@pytest.mark.parametrize(("from_tokens", "chains"), [(109, False), (110, True)])
def test_small_mixed_steps_verify_chains(from_tokens: float, chains: bool) -> None:
    step = planned(MIXED, from_tokens)
    assert step.as_chains == chains and step.has_trees != chains
    assert step.kind == (RoundKind.MIXED if chains else RoundKind.TREE)


@pytest.mark.parametrize("requests", [TREES, DECODE, PREFILL], ids=["trees", "decode", "prefill"])
def test_a_step_of_one_sort_is_not_mixed(requests: list[tuple[int, int]]) -> None:
    assert not planned(requests, from_tokens=1e9).as_chains


def test_chains_where_they_are_asked_for() -> None:
    step = planned(TREES, asked=True)
    assert step.as_chains and not step.has_trees and step.kind == RoundKind.CHOSEN
    # Not in a step with other rows: it may have trees of several sizes.
    step = planned(MIXED, asked=True)
    assert not step.as_chains and step.has_trees and step.kind == RoundKind.TREE


def test_a_capture() -> None:
    """Its form is the one asked for, however small the batch."""
    for asked in (False, True):
        step = planned(TREES, 1e9, asked, graph=True)
        assert step.in_graph and step.as_chains == asked
    assert not planned(MIXED, 1e9, graph=True).as_chains


@pytest.mark.parametrize(
    ("hidden_size", "ranks", "mla", "expected"),
    [(4096, 1, False, 1), (8192, 1, False, 1 / 4), (4096, 2, False, 2), (4096, 1, True, 0)],
    ids=["plain", "wide", "two ranks", "latent"],
)
def test_where_mixed_steps_become_large(
    hidden_size: int, ranks: int, mla: bool, expected: float
) -> None:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=mla, get_hidden_size=lambda: hidden_size),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    assert mixed_tree_tokens(config) == plan.MIXED_TREE_TOKENS * expected


def test_shared_steps() -> None:
    """The host knows how many rows there are, not whose."""
    step = plan_shared_step(np.array([8, 5, 8]), 12)
    assert step.shared and step.has_trees and not step.has_plain_rows and not step.as_chains
    assert (step.max_verify_len, step.num_tree_rows, step.tree_lens) == (8, 12, None)
    assert not plan_shared_step(np.array([2, 2]), 3).has_trees, "trees of one node are chains"
