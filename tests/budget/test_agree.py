# SPDX-License-Identifier: Apache-2.0
"""Ranks with clocks and measured times of their own choose the same budgets.

Where one scheduler serves all ranks (uni, mp, Ray) there is nothing to agree on. Where every rank
has one (external_launcher), the first rank's numbers count. Two ranks in lockstep stand in for
torchrun here; `engine/test_external_launcher.py` runs the real one.
"""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.ray_executor import RayDistributedExecutor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

from tests.budget.test_acceptance import Rounds
from tests.budget.test_auto import machine, output
from vllm_ddtree.budget import agree, auto
from vllm_ddtree.budget.auto import AutoBudget, Watch
from vllm_ddtree.budget.cost import Costs

FLAT = [1.0] * 64


@pytest.mark.parametrize("kind", [UniProcExecutor, MultiprocExecutor, RayDistributedExecutor])
def test_one_scheduler_has_nothing_to_agree_on(kind: Any) -> None:
    assert agree.agreement(kind.__new__(kind)) is None


@pytest.mark.parametrize(("ranks", "agrees"), [(1, False), (2, True)])
def test_a_scheduler_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, ranks: int, agrees: bool
) -> None:
    sent: list[tuple[Any, int]] = []

    def broadcast_object(value: Any, src: int) -> str:
        sent.append((value, src))
        return "the first rank's"

    group = SimpleNamespace(world_size=ranks, broadcast_object=broadcast_object)
    monkeypatch.setattr(agree, "get_tp_group", lambda: group)
    kind: Any = ExecutorWithExternalLauncher
    agreed = agree.agreement(kind.__new__(kind))
    assert (agreed is not None) == agrees
    if agreed is not None:
        assert agreed("mine") == "the first rank's" and sent == [("mine", 0)]


class Executor:
    """Answers the meter's reading; every rank's meter shows the same."""

    def __init__(self) -> None:
        self.counts = Rounds(64, FLAT, FLAT).verify(63, 3000)

    def collective_rpc(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(result=lambda: [self.counts])


def choices(seed: int, agreeing: bool) -> list[list[int]]:
    """What two ranks choose at every step, in lockstep, each with noise of its own."""
    said: dict[int, Any] = {}
    rng = random.Random(seed)
    watches, noise = [], []
    for rank in range(2):
        rounds = {
            shape: ms * rng.uniform(0.7, 1.3) for shape, ms in machine(knee=160).rounds.items()
        }

        def agreed(value: Any, rank: int = rank) -> Any:
            # In lockstep, the first rank comes first.
            if rank == 0:
                said[0] = copy.deepcopy(value)
                return value
            return copy.deepcopy(said[0])

        budget = AutoBudget(Costs(rounds), 8, 15, agree=agreed if agreeing else None)
        watches.append(Watch(budget, Executor()))
        noise.append(random.Random((seed, rank).__hash__()))
    chosen: list[list[int]] = [[], []]
    now = [0.0, 5.0]
    load = random.Random(seed + 1)
    num_reqs = 1
    for step in range(4 * auto.READ_EVERY):
        if step % 5 == 0:
            num_reqs = load.randint(1, 8)
        for rank, watch in enumerate(watches):
            nodes = watch.auto[num_reqs]
            chosen[rank].append(nodes)
            now[rank] += 0.006 * noise[rank].uniform(0.6, 2.0)
            watch.step(output({str(i): nodes + 1 for i in range(num_reqs)}, nodes), now[rank])
    return chosen


@pytest.mark.parametrize("seed", range(8))
def test_ranks_in_lockstep_choose_alike(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(auto, "SAY_EVERY", 0.05)  # the log's line asks for choices, too
    one, other = choices(seed, agreeing=True)
    assert one == other and len(set(one)) > 1


def test_without_agreement_they_part() -> None:
    parted = [choices(seed, agreeing=False) for seed in range(8)]
    assert any(one != other for one, other in parted)
