# SPDX-License-Identifier: Apache-2.0
"""Every invariant of `VLLM_DDTREE_CHECK=1` holds in a right state and fires in a broken one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_ddtree import invariants
from vllm_ddtree.commit.kv import KVCompactor, make_compactors
from vllm_ddtree.invariants.free_slots import FreeSlots
from vllm_ddtree.invariants.step import MovedRows, check_step
from vllm_ddtree.invariants.stop import Broken
from vllm_ddtree.round.emitted import Emitted
from vllm_ddtree.round.layout import Layout
from vllm_ddtree.round.meter import Meter
from vllm_ddtree.round.paths import Paths
from vllm_ddtree.round.rows import RowBuffers, prepare_rows
from vllm_ddtree.round.runtime import Runtime
from vllm_ddtree.round.step import Step
from vllm_ddtree.round.trees import TreeBuffers
from vllm_ddtree.sampler.walk import walk
from vllm_ddtree.tree.build import build_trees

BUDGET, DEPTH, TOP_K, MAX_REQS = 40, 3, 4, 4
ROWS = BUDGET + 1
BLOCK_SIZE, NUM_BLOCKS = 8, 32
# A prefill, and two trees; the index and the committed length of each.
NAMES, INDICES, PREFIX, LENS = ["prefill", "one", "two"], [1, 3, 0], [0, 5, 17], [6, ROWS, ROWS]


class State:
    """A verified step, made by the kernels that make it in an engine."""

    def __init__(self, device: torch.device) -> None:
        self.runtime = rt = Runtime(
            budget=BUDGET,
            max_depth=DEPTH,
            top_k=TOP_K,
            trees=TreeBuffers(MAX_REQS, BUDGET, device),
            rows=RowBuffers(128, MAX_REQS, BUDGET, device),
            paths=Paths.empty(MAX_REQS, DEPTH, 128, device),
            meter=Meter(BUDGET, device),
        )
        torch.manual_seed(0)
        log_probs = torch.randn(2, DEPTH, TOP_K).log_softmax(-1).sort(-1, descending=True).values
        token_ids = torch.arange(TOP_K).expand(2, DEPTH, TOP_K).contiguous()
        drafts = torch.zeros(2, BUDGET, dtype=torch.int64)
        build_trees(log_probs, token_ids, torch.tensor(INDICES[1:]), rt.trees, drafts, DEPTH)
        self.indices = torch.tensor(INDICES)
        starts = torch.tensor([0, *LENS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        cu_num_logits = torch.tensor([0, 1, 1 + ROWS, 1 + 2 * ROWS], dtype=torch.int32)
        seq_lens = torch.tensor([p + n for p, n in zip(PREFIX, LENS, strict=True)]).int()
        linear = torch.cat([p + torch.arange(n) for p, n in zip(PREFIX, LENS, strict=True)])
        total = int(starts[-1])
        layout = Layout(self.indices, starts, cu_num_logits)
        prepare_rows(
            rt.trees, rt.rows, rt.paths, layout, seq_lens, linear,
            num_reqs_padded=3, num_tokens_padded=total, max_query_len=ROWS,
        )  # fmt: skip
        # The second best child, then its best: a path that skips rows.
        choices = torch.zeros(1 + 2 * ROWS, dtype=torch.int64)
        choices[cu_num_logits[1:3].long()] = 1
        checked = torch.full((1 + 2 * ROWS,), -1, dtype=torch.int64)
        checked[2 : 1 + ROWS], checked[2 + ROWS :] = drafts[0], drafts[1]
        emitted = Emitted.empty(3, DEPTH, device)
        walk(choices, checked, rt.trees, layout, rt.paths, emitted)
        self.num_sampled = emitted.num_sampled
        self.num_computed = torch.zeros(MAX_REQS, dtype=torch.int32)
        self.num_computed[self.indices] = torch.tensor(PREFIX).int() + self.num_sampled
        # A drafter's group without slots, and the target's.
        slots = torch.full((2, 128), -1, dtype=torch.int64)
        slots[1, :total] = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:total]
        rt.step = Step(
            verified=True, num_reqs=3, req_ids=NAMES, query_start_loc=starts, slot_mappings=slots
        )
        self.caches = [torch.randn(NUM_BLOCKS, 2, BLOCK_SIZE, 8) for _ in range(2)]

    @property
    def compactors(self) -> list[tuple[int, KVCompactor]]:
        return [(1, compactor) for compactor in make_compactors(self.caches)]

    def check(self) -> tuple[Broken, MovedRows]:
        return check_step(
            self.runtime, self.compactors, self.indices, self.num_sampled, self.num_computed
        )

    def compact(self) -> None:
        rt, step = self.runtime, self.runtime.step
        assert step.slot_mappings is not None and step.query_start_loc is not None
        for gid, compactor in self.compactors:
            compactor.compact(
                step.slot_mappings[gid], step.query_start_loc, rt.rows.tail_lens, rt.paths, 3
            )  # fmt: skip


@pytest.fixture(scope="module")
def right(device: str) -> State:
    with torch.device(device):
        return State(torch.device(device))


@pytest.fixture
def state(device: str, right: State) -> Iterator[State]:
    """A copy, to be broken."""
    with torch.device(device):
        yield copy.deepcopy(right)


def test_a_right_step_passes(state: State) -> None:
    lengths = state.runtime.paths.lens[1:3].tolist()
    assert lengths[0] > 2 and int(state.runtime.paths.rows[1, 1]) > 1
    broken, commit = state.check()
    state.compact()
    assert broken == {} == commit.check()


def first_row(state: State) -> int:
    """The batch's row of the root of request "two"."""
    return LENS[0] + LENS[1]


def set_to(where: Callable[[Runtime], torch.Tensor], *index: int, value: int) -> Any:
    def change(state: State) -> None:
        where(state.runtime)[index] = value

    return change


def cycle(state: State) -> None:
    state.runtime.trees.parents[0, 5] = 7


def self_loop(state: State) -> None:
    state.runtime.trees.parents[0, 5] = 5


def hidden_self(state: State) -> None:
    state.runtime.rows.masks[first_row(state) + 33, 1] ^= 2


def hidden_root(state: State) -> None:
    state.runtime.rows.masks[first_row(state) + 9, 0] ^= 1


def seen_sibling(state: State) -> None:
    second = state.runtime.trees.parents[0].tolist().index(0, 2)  # child of the root
    state.runtime.rows.masks[first_row(state) + second, 0] |= 2


def one_slot_twice(state: State) -> None:
    slots = state.runtime.step.slot_mappings
    assert slots is not None
    slots[1, first_row(state) + 3] = slots[1, LENS[0] + 4]  # of request "one"


def no_slot(state: State) -> None:
    slots = state.runtime.step.slot_mappings
    assert slots is not None
    slots[1, first_row(state) + 3] = -1


def one_row_more(state: State) -> None:
    state.runtime.paths.lens[2] += 1


def one_row_less(state: State) -> None:
    state.runtime.paths.lens[2] -= 1


def another_path(state: State) -> None:
    parents = state.runtime.trees.parents[0].tolist()
    state.runtime.paths.rows[2, 1] = parents.index(1)  # a grandchild of the root


def moved_root(state: State) -> None:
    state.runtime.rows.positions[first_row(state) : first_row(state) + ROWS] += 1


def another_length(state: State) -> None:
    state.num_computed[0] -= 1


def shorter_prefix(state: State) -> None:
    state.runtime.rows.prefix_lens[2] -= 1


@pytest.mark.parametrize(
    ("invariant", "breaks"),
    [
        ("parents before children", cycle),
        ("parents before children", self_loop),
        ("depth = parent's depth", set_to(lambda rt: rt.trees.depths, 0, 5, value=7)),
        ("depth = parent's depth", set_to(lambda rt: rt.trees.depths, 0, 0, value=1)),
        (
            "position = root's position + depth",
            set_to(lambda rt: rt.rows.positions, LENS[0] + LENS[1] + 4, value=3),
        ),
        ("a row sees itself and its ancestors", hidden_self),
        ("a row sees itself and its ancestors", hidden_root),
        ("a row sees itself and its ancestors", seen_sibling),
        ("accepted rows = emitted tokens", one_row_more),
        ("accepted rows = emitted tokens", one_row_less),
        ("the accepted rows are a path", another_path),
        ("root position = committed length", moved_root),
        ("root position = committed length", another_length),
        ("root position = committed length", shorter_prefix),
        ("slots of tree rows are distinct", one_slot_twice),
        ("slots of tree rows are there", no_slot),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_it_fires(state: State, invariant: str, breaks: Callable[[State], None]) -> None:
    """For the request that it is about, and for no other one."""
    breaks(state)
    broken, commit = state.check()
    sharing = {"one", "two"} if breaks is one_slot_twice else {"two"}
    assert broken.keys() == sharing
    assert broken["two"].startswith(invariant)
    state.compact()
    assert commit.check() == {}  # of the other one


def test_a_chain_that_skips_rows(state: State) -> None:
    state.runtime.step.as_chains = True
    broken, _ = state.check()
    assert broken["one"].startswith("a chain's accepted rows lie in place")


def test_rows_that_were_not_moved(state: State) -> None:
    _, commit = state.check()
    broken = commit.check()
    assert broken.keys() == {"one", "two"}
    assert broken["one"].startswith("accepted rows = compacted rows")


def test_a_row_that_was_overwritten(state: State) -> None:
    _, commit = state.check()
    state.compact()
    slots = state.runtime.step.slot_mappings
    assert slots is not None
    slot = int(slots[1, first_row(state) + 1])
    state.caches[1][slot // BLOCK_SIZE, 1, slot % BLOCK_SIZE, 3] += 1
    broken = commit.check()
    assert broken.keys() == {"two"} and "cache 1: path elements [1]" in broken["two"]


def test_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("VLLM_DDTREE_CHECK", value)
        assert invariants.enabled() is expected
    monkeypatch.delenv("VLLM_DDTREE_CHECK")
    assert not invariants.enabled()


BLOCK = 5


@pytest.fixture
def free(state: State) -> tuple[FreeSlots, Callable[[int], None]]:
    """A step before its forward, and a write to a slot of its second cache.

    Request "one" has block 5, with a row in its first slot, "two" block 6, nobody another one.
    """
    slots = torch.full((2, 3), -1, dtype=torch.int64)
    slots[1] = torch.tensor([BLOCK * BLOCK_SIZE, (BLOCK + 1) * BLOCK_SIZE, -1])
    step = Step(num_reqs=2, req_ids=["one", "two"], slot_mappings=slots)
    tables = torch.tensor([[BLOCK, 9], [BLOCK + 1, 9]], dtype=torch.int32)
    lengths = torch.tensor([BLOCK_SIZE, 1], dtype=torch.int32)
    caches = FreeSlots(step, state.compactors, [tables, tables], lengths)

    def write(slot: int) -> None:
        state.caches[1][slot // BLOCK_SIZE, 0, slot % BLOCK_SIZE, 3] += 1

    return caches, write


def test_a_step_writes_its_own_slots(free: tuple[FreeSlots, Callable[[int], None]]) -> None:
    caches, write = free
    write(BLOCK * BLOCK_SIZE)
    assert caches.check() == {}


def test_a_slot_of_a_request_that_is_no_rows(
    free: tuple[FreeSlots, Callable[[int], None]],
) -> None:
    caches, write = free
    write(slot := BLOCK * BLOCK_SIZE + 1)
    broken = caches.check()
    assert broken.keys() == {"one"}
    assert f"free slots are never written: KV group 1, cache 1: slots [{slot}]" in broken["one"]


def test_a_slot_of_nobody(free: tuple[FreeSlots, Callable[[int], None]]) -> None:
    """Beyond a request's length, too: nobody can be told whose data it was."""
    caches, write = free
    write(9 * BLOCK_SIZE + 2)
    with pytest.raises(RuntimeError, match=r"slots \[74\] of blocks \[9\].*no request of the step"):
        caches.check()
