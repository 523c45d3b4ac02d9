# SPDX-License-Identifier: Apache-2.0
"""`VLLM_DDTREE_CHECK=1`: what must hold after every verify step, checked on the host.

A violation raises RuntimeError with the request, the invariant and the values. Every check waits
for the device and copies from it: this is for finding faults, not for serving.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from vllm_ddtree.commit.kv import KVCompactor
from vllm_ddtree.runtime import Runtime


def enabled() -> bool:
    """Whether the environment asks for the checks; read once, when an engine starts."""
    return os.environ.get("VLLM_DDTREE_CHECK") == "1"


@dataclass(frozen=True)
class Tree:
    """One request's tree rows in the step that was verified."""

    request: str
    slot: int
    root: int
    """Row of the batch."""
    num_rows: int
    path: list[int]
    """Accepted tree rows, root first."""

    def broken(self, invariant: str, values: str) -> NoReturn:
        """Raise for this request."""
        raise RuntimeError(
            f"ddtree invariant broken: request {self.request!r}: {invariant}: {values} "
            f"(slot {self.slot}, rows {self.root} to {self.root + self.num_rows - 1}, "
            f"accepted tree rows {self.path})"
        )


class Commit:
    """The keys and values of the accepted rows, kept until they have been moved."""

    def __init__(self, trees: list[Tree], slots: dict[int, list[int]], compactors: Any) -> None:
        self._trees = trees
        self._slots = slots
        self._compactors: Sequence[tuple[int, KVCompactor]] = compactors
        self._before = self._read(moved=False)

    def _read(self, moved: bool) -> list[torch.Tensor]:
        """Per tree and cache: [path rows, Hkv, C], bit by bit."""
        found = []
        for tree in self._trees:
            rows = range(len(tree.path)) if moved else tree.path
            for gid, compactor in self._compactors:
                slots = torch.tensor([self._slots[gid][tree.root + row] for row in rows])
                block, offset = slots // compactor.block_size, slots % compactor.block_size
                for cache in compactor.caches:
                    there = block.to(cache.device), offset.to(cache.device)
                    found.append(cache[there[0], :, there[1]].contiguous().view(torch.uint8).cpu())
        return found

    def check(self) -> None:
        """Accepted rows = compacted rows: each lies where the next round reads it."""
        after = iter(zip(self._before, self._read(moved=True), strict=True))
        for tree in self._trees:
            for gid, compactor in self._compactors:
                for number in range(len(compactor.caches)):
                    old, new = next(after)
                    wrong = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
                    if wrong:
                        tree.broken(
                            "accepted rows = compacted rows",
                            f"KV group {gid}, cache {number}: path elements {wrong} were not moved",
                        )


def check_step(
    runtime: Runtime,
    compactors: Sequence[tuple[int, KVCompactor]],
    idx_mapping: torch.Tensor,  # [num_reqs] int64, request -> slot; negative: left out
    num_sampled: torch.Tensor,  # [num_reqs] int32, accepted + 1; 0 where nothing was sampled
    num_computed_tokens: torch.Tensor,  # [max_num_reqs] int32, by slot, after the step
) -> Commit:
    """Check the trees of the step that was just verified, before its rows are moved.

    Returns:
        What to check after they have been moved.

    Raises:
        RuntimeError: an invariant does not hold.

    """
    step, rows = runtime.step, runtime.rows
    assert step.query_start_loc is not None and step.slot_mappings is not None
    ends = step.query_start_loc[1 : step.num_reqs + 1].tolist()
    tails = rows.tail_lens[: step.num_reqs].tolist()
    slots = {gid: step.slot_mappings[gid].tolist() for gid, _ in compactors}
    trees = []
    owners: dict[tuple[int, int], str] = {}
    for i, (slot, sampled) in enumerate(
        zip(idx_mapping.tolist(), num_sampled.tolist(), strict=True)
    ):
        if slot < 0 or sampled == 0 or tails[i] == 0:
            continue
        path = runtime.path_rows[i, : int(runtime.path_lens[i])].tolist()
        tree = Tree(step.req_ids[i], slot, ends[i] - tails[i], tails[i], path)
        trees.append(tree)
        parents = _check_shape(runtime, tree)
        if not step.as_chains:  # chains are attended causally, their masks are not read
            _check_masks(runtime, tree, parents)
        if (length := int(runtime.path_lens[i])) != sampled:
            tree.broken("accepted rows = emitted tokens", f"{length} rows, {sampled} tokens")
        _check_path(tree, parents, step.as_chains)
        committed = int(num_computed_tokens[slot]) - sampled
        root, prefix = int(rows.positions[tree.root]), int(rows.prefix_lens[i])
        if not root == prefix == committed:
            tree.broken(
                "root position = committed length",
                f"root at position {root}, {prefix} keys before it, {committed} tokens committed",
            )
        _check_slots(tree, slots, owners)
    return Commit(trees, slots, compactors)


def _check_shape(runtime: Runtime, tree: Tree) -> list[int]:
    """Parents come first and are one less deep; returns the parents."""
    parents = runtime.trees.parents[tree.slot, : tree.num_rows].tolist()
    depths = runtime.trees.depths[tree.slot, : tree.num_rows].tolist()
    base = int(runtime.rows.positions[tree.root])
    positions = runtime.rows.positions[tree.root : tree.root + tree.num_rows].tolist()
    for row, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
        # Unused rows have no parent and the depth of the root's children.
        if not -1 <= parent < row:
            tree.broken("parents before children", f"row {row} has parent {parent}")
        expected = depths[parent] + 1 if parent >= 0 else min(row, 1)
        if depth != expected:
            tree.broken(
                "depth = parent's depth + 1",
                f"row {row} has depth {depth}, its parent {parent} is at {expected - 1}",
            )
        if positions[row] != base + depth:
            tree.broken(
                "position = root's position + depth",
                f"row {row} of depth {depth} at position {positions[row]}, the root at {base}",
            )
    return parents


def _check_masks(runtime: Runtime, tree: Tree, parents: list[int]) -> None:
    """Every row sees itself and its ancestors, the root among them, and nothing else."""
    words = runtime.rows.masks[tree.root : tree.root + tree.num_rows].tolist()
    seen: list[int] = []
    for row, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 1) | 1 << row)
        mask = sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(words[row]))
        if mask != seen[row]:
            tree.broken(
                "a row sees itself and its ancestors",
                f"row {row} sees {_bits(mask)}, not {_bits(seen[row])}",
            )


def _bits(mask: int) -> list[int]:
    """Numbers of the bits that are set."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def _check_path(tree: Tree, parents: list[int], as_chain: bool) -> None:
    """The accepted rows go from the root down, each to a child."""
    steps = [(-1, 0), *zip(tree.path, tree.path[1:], strict=False)]
    if tree.path[0] != 0 or any(
        not 0 <= row < tree.num_rows or parents[row] != before for before, row in steps
    ):
        tree.broken("the accepted rows are a path of the tree", f"parents {parents}")
    if as_chain and tree.path != list(range(len(tree.path))):
        tree.broken("a chain's accepted rows lie in place", f"{tree.path}")


def _check_slots(
    tree: Tree, slots: dict[int, list[int]], owners: dict[tuple[int, int], str]
) -> None:
    """Every tree row has a KV slot that no other tree row of the batch has."""
    for gid, all_slots in slots.items():
        mine = all_slots[tree.root : tree.root + tree.num_rows]
        for row, slot in enumerate(mine):
            if slot < 0:
                tree.broken("slots of tree rows are there", f"KV group {gid}, row {row}: {slot}")
            owner = owners.setdefault((gid, slot), f"row {row} of {tree.request!r}")
            if owner != f"row {row} of {tree.request!r}":
                tree.broken(
                    "slots of tree rows are distinct",
                    f"KV group {gid}, row {row}: slot {slot} is that of {owner}",
                )
