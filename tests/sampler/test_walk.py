# SPDX-License-Identifier: Apache-2.0
"""The walk kernel follows the reference on random trees, and emitted tokens get the rows that they
belong to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from vllm_ddtree.round.emitted import Emitted
from vllm_ddtree.round.layout import Layout
from vllm_ddtree.round.meter import Counts
from vllm_ddtree.round.paths import Paths
from vllm_ddtree.round.trees import TreeBuffers
from vllm_ddtree.sampler.walk import path_logit_rows, walk
from vllm_ddtree.tree.reference import Tree, accepted_path, build_tree


@dataclass
class Walked:
    """What the walk wrote; `spare` rows and requests keep the fill value -7."""

    emitted: Emitted
    paths: Paths
    layout: Layout
    counts: Counts


def random_tree(rng: np.random.Generator, budget: int, depth: int, vocab: int) -> Tree:
    top_k = min(budget, vocab)
    log_probs = -np.sort(rng.exponential(2.0, (depth, top_k)), axis=1).astype(np.float32)
    token_ids = np.stack([rng.permutation(vocab)[:top_k] for _ in range(depth)])
    return build_tree(log_probs, token_ids, budget)


def run_walk(
    trees: list[Tree],
    choices: list[np.ndarray],
    drafts: list[np.ndarray],
    budget: int,
    depth: int,
    device: str,
    prefix_rows: list[int],
) -> Walked:
    """A batch of trees at scattered indices, `prefix_rows` query rows before each one's tree."""
    num_reqs = len(trees)
    indices = [2 * i + 1 for i in reversed(range(num_reqs))]
    buffers = TreeBuffers(2 * num_reqs + 2, budget, device)
    for index, tree in zip(indices, trees, strict=True):
        buffers.parents[index, : tree.num_nodes + 1] = torch.from_numpy(tree.parents)
    rows = [len(d) for d in drafts]
    cu = np.cumsum([0, *rows])
    starts = np.cumsum([0, *(r + p for r, p in zip(rows, prefix_rows, strict=True))])

    def put(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.asarray(array)).to(device=device, dtype=dtype)

    def filled(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, -7, dtype=dtype, device=device)

    out = Walked(
        emitted=Emitted(
            filled(num_reqs, 2 * (depth + 1), dtype=torch.int64),
            filled(num_reqs),
        ),
        paths=Paths(
            filled(num_reqs + 1, depth + 1),
            filled(num_reqs + 1),
            torch.arange(int(starts[-1]) + 3, dtype=torch.int64, device=device),
        ),
        layout=Layout(
            put(np.array(indices), torch.int64), put(starts, torch.int32), put(cu, torch.int32)
        ),
        counts=Counts(
            torch.randint(1 << 20, buffers.parents.shape, dtype=torch.int32, device=device),
            torch.zeros(2, budget + 1, dtype=torch.int64, device=device),
        ),
    )
    buffers.chain_only[indices[0]] = 1  # left out of the counts
    walk(
        put(np.concatenate(choices), torch.int64),
        put(np.concatenate(drafts), torch.int64),
        buffers,
        out.layout,
        out.paths,
        out.emitted,
        out.counts,
    )
    check_counts(out, out.counts.claims.cpu()[indices])
    return out


def check_counts(out: Walked, claims: torch.Tensor) -> None:
    """What verified rows claim, and accepted rows, of the trees with two rows or more but the
    first."""
    expected = torch.zeros(2, claims.shape[1], dtype=torch.int64)
    for i in range(1, len(out.emitted.tokens)):
        num_rows = int(out.layout.cu_num_logits[i + 1] - out.layout.cu_num_logits[i])
        if num_rows > 1:
            expected[0, :num_rows] += claims[i, :num_rows]
            expected[1, out.paths.rows[i, : out.paths.lens[i]].long().cpu()] += 1
    assert torch.equal(out.counts.totals.cpu(), expected)


def random_batch(
    seed: int, budget: int, depth: int, vocab: int, num_reqs: int = 6
) -> tuple[list[Tree], list[np.ndarray], list[np.ndarray]]:
    """Trees, and choices that lead some way down them; the last tree has padded rows."""
    rng = np.random.default_rng(seed)
    trees, choices, drafts = [], [], []
    for _ in range(num_reqs):
        tree = random_tree(rng, budget, depth, vocab)
        chosen = rng.integers(0, vocab, tree.num_nodes + 1)
        for row in range(tree.num_nodes + 1):  # mostly a child, where there is one
            children = np.flatnonzero(tree.parents == row)
            if len(children) and rng.random() < 0.8:
                chosen[row] = tree.tokens[rng.choice(children)]
        trees.append(tree)
        choices.append(chosen)
        drafts.append(np.array([rng.integers(0, vocab), *tree.tokens[1:]]))
    return trees, choices, drafts


def check(walked: Walked, i: int, tree: Tree, choices: np.ndarray) -> int:
    """One request against the reference; its accepted nodes."""
    rows, bonus = accepted_path(tree, choices)
    accepted = len(rows)
    assert walked.emitted.num_sampled[i] == walked.paths.lens[i] == accepted + 1
    assert walked.paths.rows[i, : accepted + 1].tolist() == [0, *rows]
    tokens = [*(int(tree.tokens[row]) for row in rows), bonus]
    assert walked.emitted.tokens[i, : accepted + 1].tolist() == tokens
    # The tree's rows are the last of the request's query rows.
    start, end = walked.layout.query_start_loc[i : i + 2].tolist()
    first, last = walked.layout.cu_num_logits[i : i + 2].tolist()
    base = end - (last - first)
    expected = list(range(start, end))
    expected[base - start : base - start + accepted + 1] = [base + row for row in [0, *rows]]
    assert walked.paths.gather_index[start:end].tolist() == expected
    # For the metrics: nodes that could be accepted, ranks of those that were, nothing else.
    facts = [int((tree.parents[: last - first] >= 0).sum()), *tree.ranks[rows].tolist()]
    written = walked.emitted.facts[i].tolist()
    assert written == facts + [-7] * (len(written) - len(facts))
    return accepted


@pytest.mark.parametrize(("budget", "depth"), [(1, 1), (3, 2), (5, 7), (12, 4), (31, 7), (63, 15)])
def test_random_trees(device: str, budget: int, depth: int) -> None:
    accepted = []
    for seed in range(4):
        trees, choices, drafts = random_batch(seed, budget, depth, vocab=max(8, budget))
        prefix = [0, 2, 0, 1, 0, 3]
        walked = run_walk(trees, choices, drafts, budget, depth, device, prefix)
        accepted += [check(walked, i, trees[i], choices[i]) for i in range(len(trees))]
        # Nothing past the last request.
        assert walked.paths.lens[-1] == -7 and (walked.paths.rows[-1] == -7).all()
        total = len(walked.paths.gather_index)
        assert walked.paths.gather_index[-3:].tolist() == list(range(total - 3, total))
    assert max(accepted) > 0
    if budget > 1:
        assert len(set(accepted)) > 1


def test_a_refused_draft_hides_its_subtree(device: str) -> None:
    """vLLM marks placeholders and what a grammar refuses by -1: neither they nor what is below."""
    changed = 0
    for seed in range(6):
        trees, choices, drafts = random_batch(seed, budget=12, depth=4, vocab=16)
        rng = np.random.default_rng(100 + seed)
        expected = []
        for i, tree in enumerate(trees):
            refused = 1 + np.flatnonzero(rng.random(tree.num_nodes) < 0.3)
            drafts[i][refused] = -1
            expected.append(_without(tree, refused))
            changed += accepted_path(tree, choices[i]) != accepted_path(expected[i], choices[i])
        walked = run_walk(trees, choices, drafts, 12, 4, device, [0] * len(trees))
        for i in range(len(trees)):
            check(walked, i, expected[i], choices[i])
    assert changed > 0


def test_a_tree_that_lost_its_last_nodes(device: str) -> None:
    """Near the length limit, and when the step is full, only the first rows are verified."""
    budget, depth = 12, 4
    trees, choices, drafts = random_batch(3, budget, depth, vocab=16)
    kept = [1, 2, 5, 12, 13, 7]
    cut = [_without(t, np.arange(k, t.num_nodes + 1)) for t, k in zip(trees, kept, strict=True)]
    shorter_choices = [c[:k] for c, k in zip(choices, kept, strict=True)]
    shorter_drafts = [d[:k] for d, k in zip(drafts, kept, strict=True)]
    walked = run_walk(trees, shorter_choices, shorter_drafts, budget, depth, device, [0] * 6)
    for i in range(len(trees)):
        check(walked, i, cut[i], choices[i])
    assert walked.emitted.num_sampled[0] == 1  # the root alone


def test_padded_rows_are_never_followed(device: str) -> None:
    """A tree of fewer nodes than the budget: rows behind it have token 0 and no parent."""
    budget, depth = 12, 4
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 3, depth, 16)
    tokens = np.zeros(budget + 1, np.int64)
    tokens[: tree.num_nodes + 1] = tree.tokens
    choices = np.zeros(budget + 1, np.int64)  # token 0 everywhere: that of the padding
    padded = run_walk([tree], [choices], [tokens], budget, depth, device, [0])
    check(padded, 0, _without(tree, np.array([], int)), choices[: tree.num_nodes + 1])


def test_every_row_is_judged_by_its_own_choice(device: str) -> None:
    """Row r chooses a token that names r: emitted tokens name the rows that were visited."""
    rng = np.random.default_rng(5)
    for _ in range(5):
        tree = random_tree(rng, 12, 4, 16)
        leaf = int(np.argmax(tree.depths))
        path = []
        while leaf > 0:
            path.append(leaf)
            leaf = int(tree.parents[leaf])
        path.reverse()
        # Each node's token is 1000 + its parent's row, on the path; no other node can match.
        tokens = np.arange(tree.num_nodes + 1) + 5000
        for row in path:
            tokens[row] = 1000 + tree.parents[row]
        choices = np.arange(tree.num_nodes + 1) + 1000
        walked = run_walk([tree], [choices], [tokens], 12, 4, device, [0])
        length = int(walked.emitted.num_sampled[0])
        assert walked.emitted.tokens[0, :length].tolist() == [1000, *(1000 + row for row in path)]
        assert walked.paths.rows[0, :length].tolist() == [0, *path]


def test_path_logit_rows(device: str) -> None:
    trees, choices, drafts = random_batch(1, budget=12, depth=4, vocab=16)
    walked = run_walk(trees, choices, drafts, 12, 4, device, [0] * len(trees))
    out = torch.full((int(walked.layout.cu_num_logits[-1]),), -7, dtype=torch.int64, device=device)
    rows = path_logit_rows(walked.paths, walked.layout.cu_num_logits, out)
    for i in range(len(trees)):
        first, end = walked.layout.cu_num_logits[i : i + 2].tolist()
        expected = list(range(first, end))
        length = int(walked.paths.lens[i])
        expected[:length] = [first + row for row in walked.paths.rows[i, :length].tolist()]
        assert rows[first:end].tolist() == expected


def _without(tree: Tree, rows: np.ndarray) -> Tree:
    """The tree with these rows out of reach."""
    parents = tree.parents.copy()
    parents[rows] = -1
    return Tree(tree.tokens, parents, tree.depths, tree.ranks, tree.scores, tree.masks)
