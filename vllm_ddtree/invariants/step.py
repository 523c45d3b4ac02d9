# SPDX-License-Identifier: Apache-2.0
"""What must hold for every tree of a verified step, before and after its rows are moved."""

from dataclasses import dataclass
from typing import NoReturn

import torch

from vllm_ddtree.commit.target import Compactors
from vllm_ddtree.invariants.stop import Broken
from vllm_ddtree.round.runtime import Runtime


class BrokenTreeError(Exception):
    """An invariant does not hold for a tree."""


@dataclass(frozen=True)
class Tree:
    """One request's tree rows in the step that was verified."""

    request: str
    """vLLM's id of the request."""
    index: int
    """The request's index."""
    root: int
    """Row of the batch."""
    num_rows: int
    """Rows of the tree."""
    path: list[int]
    """Accepted tree rows, root first."""

    def broken(self, invariant: str, values: str) -> NoReturn:
        """Raise for this request."""
        raise BrokenTreeError(self.describe(invariant, values))

    def describe(self, invariant: str, values: str) -> str:
        """The invariant and the values, with where the tree lies."""
        return (
            f"{invariant}: {values} (index {self.index}, rows {self.root} to "
            f"{self.root + self.num_rows - 1}, accepted tree rows {self.path})"
        )


class MovedRows:
    """The keys and values of the accepted rows, kept until they have been moved."""

    def __init__(
        self,
        trees: list[Tree],
        slots: dict[int, list[int]],
        compactors: Compactors,
    ) -> None:
        self._trees = trees
        self._slots = slots
        self._compactors = compactors
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

    def check(self) -> Broken:
        """Accepted rows = compacted rows: each lies where the next round reads it."""
        broken: Broken = {}
        after = iter(zip(self._before, self._read(moved=True), strict=True))
        for tree in self._trees:
            for gid, compactor in self._compactors:
                for number in range(len(compactor.caches)):
                    old, new = next(after)
                    wrong = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
                    if wrong:
                        text = (
                            f"KV group {gid}, cache {number}: path elements {wrong} were not moved"
                        )
                        message = tree.describe("accepted rows = compacted rows", text)
                        broken.setdefault(tree.request, message)
        return broken


def check_step(
    runtime: Runtime,
    compactors: Compactors,
    indices: torch.Tensor,
    num_sampled: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> tuple[Broken, MovedRows]:
    """Check the trees of the step that was just verified, before its rows are moved.

    Args:
        runtime: the engine's.
        compactors: of the target's caches.
        indices: int64 [num_reqs], index of each request; negative: left out.
        num_sampled: int32 [num_reqs], accepted nodes + 1; 0 where nothing was sampled.
        num_computed_tokens: int32 [max_num_reqs] by index, after the step.

    Returns:
        The requests for which an invariant does not hold, and what to check of the others after
        their rows have been moved.

    """
    step, rows = runtime.step, runtime.rows
    assert step.query_start_loc is not None and step.slot_mappings is not None
    ends = step.query_start_loc[1 : step.num_reqs + 1].tolist()
    tails = rows.tail_lens[: step.num_reqs].tolist()
    slots = {gid: step.slot_mappings[gid].tolist() for gid, _ in compactors}
    trees: list[Tree] = []
    broken: Broken = {}
    for i, (index, sampled) in enumerate(zip(indices.tolist(), num_sampled.tolist(), strict=True)):
        if index < 0 or sampled == 0 or tails[i] == 0:
            continue
        path = runtime.paths.rows[i, : int(runtime.paths.lens[i])].tolist()
        tree = Tree(step.req_ids[i], index, ends[i] - tails[i], tails[i], path)
        trees.append(tree)
        try:
            _check_tree(runtime, tree, i, sampled, int(num_computed_tokens[index]))
        except BrokenTreeError as error:
            broken[tree.request] = str(error)
    _check_slots(trees, slots, broken)
    return broken, MovedRows([t for t in trees if t.request not in broken], slots, compactors)


def _check_tree(
    runtime: Runtime, tree: Tree, place: int, num_sampled: int, num_computed: int
) -> None:
    """The tree of the batch's request number `place`, which now has `num_computed` tokens."""
    as_chains, rows = runtime.step.as_chains, runtime.rows
    parents = _check_shape(runtime, tree)
    if not as_chains:  # chains are attended causally, their masks are not read
        _check_masks(runtime, tree, parents)
    if (length := int(runtime.paths.lens[place])) != num_sampled:
        tree.broken("accepted rows = emitted tokens", f"{length} rows, {num_sampled} tokens")
    _check_path(tree, parents, as_chains)
    committed = num_computed - num_sampled
    root, prefix = int(rows.positions[tree.root]), int(rows.prefix_lens[place])
    if not root == prefix == committed:
        tree.broken(
            "root position = committed length",
            f"root at position {root}, {prefix} keys before it, {committed} tokens committed",
        )


def _check_shape(runtime: Runtime, tree: Tree) -> list[int]:
    """Parents come first and are one less deep; returns the parents."""
    parents = runtime.trees.parents[tree.index, : tree.num_rows].tolist()
    depths = runtime.trees.depths[tree.index, : tree.num_rows].tolist()
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


def _check_slots(trees: list[Tree], slots: dict[int, list[int]], broken: Broken) -> None:
    """Every tree row has a KV slot that no other tree row of the batch has."""
    owners: dict[tuple[int, int], tuple[Tree, int]] = {}
    for tree in trees:
        for gid, all_slots in slots.items():
            mine = all_slots[tree.root : tree.root + tree.num_rows]
            for row, slot in enumerate(mine):
                values = f"KV group {gid}, row {row}: slot {slot}"
                if slot < 0:
                    message = tree.describe("slots of tree rows are there", values)
                    broken.setdefault(tree.request, message)
                    continue
                owner, owners_row = owners.setdefault((gid, slot), (tree, row))
                if (owner, owners_row) != (tree, row):
                    values += (
                        f" of {tree.request!r} is also row {owners_row}'s of {owner.request!r}"
                    )
                    message = tree.describe("slots of tree rows are distinct", values)
                    for request in (tree.request, owner.request):
                        broken.setdefault(request, message)
