# SPDX-License-Identifier: Apache-2.0
"""The law of emitted tokens: at temperature above 0 it is the target's own, whatever the tree.

20,000 rounds a tree on a tiny vocabulary through the tree sampler and vLLM's own `Sampler`.
Triton's interpreter takes milliseconds a program, so on the CPU the walk is launched for distinct
inputs only, and vLLM's Gumbel kernel is replaced by a vectorised form that is shown to give its
very choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ddtree.round.emitted import Emitted
from vllm_ddtree.round.layout import Layout
from vllm_ddtree.round.meter import Meter
from vllm_ddtree.round.paths import Paths
from vllm_ddtree.round.rows import RowBuffers
from vllm_ddtree.round.runtime import Runtime
from vllm_ddtree.round.trees import TreeBuffers
from vllm_ddtree.sampler.sampler import TreeRejectionSampler
from vllm_ddtree.sampler.walk import walk

NUM_REQS = 2000
NUM_BATCHES = 10  # 20,000 rounds
PREFIX = 7  # committed tokens of every request before its root


class Law:
    """A tree and the target's distribution after each of its rows."""

    def __init__(self, parents: list[int], tokens: list[int], probs: list[list[float]]) -> None:
        self.parents = [-1, *parents]
        self.tokens = [0, *tokens]  # the root's own token does not matter
        self.probs = np.array(probs)  # [rows, vocab]
        self.depths = [0]
        for parent in parents:
            self.depths.append(self.depths[parent] + 1)

    @property
    def budget(self) -> int:
        return len(self.parents) - 1

    def outcomes(self, probs: np.ndarray) -> dict[tuple[int, ...], float]:
        """Probability of each sequence of emitted tokens (accepted nodes and the bonus token)."""
        result: dict[tuple[int, ...], float] = {}

        def follow(row: int, emitted: tuple[int, ...], probability: float) -> None:
            for token, p in enumerate(probs[row]):
                if p == 0:
                    continue
                children = [
                    child
                    for child in range(1, len(self.parents))
                    if self.parents[child] == row and self.tokens[child] == token
                ]
                if children:
                    follow(children[0], (*emitted, token), probability * p)
                else:
                    result[(*emitted, token)] = probability * p

        follow(0, (), 1.0)
        return result


def _distributions(seed: int, rows: int, vocab: int) -> list[list[float]]:
    return np.random.default_rng(seed).dirichlet(np.full(vocab, 0.9), rows).tolist()


LAWS = {
    # faults.md's "ratio rule" example: min(1, p / q) would give 13,350 zeros instead of 12,000.
    "one-node": Law([0], [0], [[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]]),
    "siblings": Law([0, 0, 0], [3, 0, 1], _distributions(1, 4, 5)),
    "two-levels": Law([0, 0, 1, 1, 2], [0, 1, 2, 0, 0], _distributions(2, 6, 3)),
    "chain": Law([0, 1, 2], [2, 2, 0], _distributions(3, 4, 4)),
    "full": Law([0, 0, 0, 1, 2], [0, 1, 2, 1, 1], _distributions(4, 6, 3)),
}


def vectorised_gumbel_sample(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """vLLM's `_gumbel_sample_kernel` (v1/worker/gpu/sample/gumbel.py), all rows at once."""
    with np.errstate(over="ignore"):
        slots = expanded_idx_mapping.numpy()
        seeds = seed.numpy()[slots].view(np.uint64)
        positions = pos.numpy().astype(np.uint64)
        low = np.uint64(0xFFFFFFFF)

        def rotated(h: np.ndarray, by: int) -> np.ndarray:
            return (h << np.uint32(by)) | (h >> np.uint32(32 - by))

        def mixed(h: np.ndarray, key: np.ndarray) -> np.ndarray:
            key = rotated(key.astype(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
            return rotated(h ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)

        h = np.zeros((len(slots), 1), np.uint32)
        for word in (seeds & low, seeds >> np.uint64(32), positions & low):
            h = mixed(h, word[:, None])
        h = mixed(h, np.arange(logits.shape[1])[None, :]) ^ np.uint32(16)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        h ^= h >> np.uint32(16)
        uniform = (h >> np.uint32(16)).astype(np.float32) * np.float32(2.0**-16) + (
            (h & np.uint32(0xFFFF)).astype(np.float32) + np.float32(0.5)
        ) * np.float32(2.0**-32)
    noise = -np.log(-np.log1p(-uniform.astype(np.float64)))
    values = logits.double().numpy() + np.where(temperature.numpy()[slots] != 0, noise.T, 0).T
    return torch.from_numpy(values.argmax(axis=1))


def distinct_walk(
    choices: torch.Tensor,
    drafts: torch.Tensor,
    trees: TreeBuffers,
    layout: Layout,
    paths: Paths,
    emitted: Emitted,
    counts: Any,
) -> None:
    """The walk kernel, launched once for each distinct row of choices (all trees are equal).

    Nothing is counted, and no facts are kept.
    """
    num_reqs = layout.num_reqs
    kinds, kind = torch.unique(choices.view(num_reqs, -1), dim=0, return_inverse=True)
    n, rows = kinds.shape
    starts = torch.arange(n + 1, dtype=torch.int32) * rows
    to = Emitted(emitted.tokens_and_facts[:n].clone(), emitted.num_sampled[:n].clone())
    steps = Paths(paths.rows[:n].clone(), paths.lens[:n].clone(), torch.arange(n * rows))
    walk(
        kinds.reshape(-1),
        drafts[: n * rows],
        trees,
        Layout(layout.indices[:n], starts, starts),
        steps,
        to,
    )
    for whole, part in (
        (emitted.tokens, to.tokens),
        (emitted.num_sampled, to.num_sampled),
        (paths.rows, steps.rows),
        (paths.lens, steps.lens),
    ):
        whole[:num_reqs] = part[kind]


class Bench:
    """vLLM's sampler and the tree sampler over it, for requests that all verify one tree."""

    def __init__(self, law: Law, num_reqs: int, device: str, **params: Any) -> None:
        from vllm import SamplingParams
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.states import RequestState

        self.law, self.num_reqs, self.device = law, num_reqs, torch.device(device)
        vocab, rows = law.probs.shape[1], law.budget + 1
        states = RequestState(num_reqs, 1 << 10, num_reqs * rows, law.budget, vocab, self.device)
        self.sampler = Sampler(
            SimpleNamespace(reasoning_config=None),
            num_reqs,
            vocab,
            self.device,
            states,
            num_speculative_tokens=law.budget,
        )
        np.random.seed(0)  # vLLM seeds unseeded requests from here
        for index in range(num_reqs):
            self.sampler.add_request(index, SamplingParams(temperature=1.0, **params))
        self.sampler.apply_staged_writes()
        depth = max(law.depths)
        self.runtime = Runtime(
            budget=law.budget,
            max_depth=depth,
            top_k=vocab,
            trees=TreeBuffers(num_reqs, law.budget, self.device),
            rows=RowBuffers(num_reqs * rows, num_reqs, law.budget, self.device),
            paths=Paths.empty(num_reqs, depth, num_reqs * rows, device),
            meter=Meter(law.budget, self.device),
        )
        self.runtime.trees.parents[:] = torch.tensor(law.parents, dtype=torch.int32)
        self.tree_sampler = TreeRejectionSampler(
            self.sampler,
            SimpleNamespace(
                num_speculative_tokens=law.budget,
                enable_adaptive_verification=False,
                rejection_sample_method="standard",
                fly_entropy_threshold=0.3,  # read by vLLM 0.33, of no effect here
                fly_entropy_top_k=3,
            ),
            self.device,
            self.runtime,
        )
        self.logits = torch.log(torch.tensor(law.probs, dtype=torch.float32, device=device))

    def round(self, start: int) -> Any:
        """One round of every request, roots at position `start`; vLLM's SamplerOutput."""
        law, n = self.law, self.num_reqs
        rows = law.budget + 1
        indices = np.random.default_rng(start).permutation(n)
        cu = np.arange(n + 1, dtype=np.int32) * rows

        def put(array: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(array).to(device=self.device, dtype=dtype)

        self.runtime.rows.positions.copy_(put(start + np.tile(law.depths, n), torch.int64))
        batch = SimpleNamespace(
            num_reqs=n,
            input_ids=put(np.tile(law.tokens, n), torch.int32),
            positions=put(start + np.tile(np.arange(rows), n), torch.int64),
            logits_indices=put(np.arange(n * rows), torch.int64),
            idx_mapping=put(indices, torch.int64),
            idx_mapping_np=indices,
            expanded_idx_mapping=put(np.repeat(indices, rows), torch.int64),
            expanded_local_pos=put(np.tile(np.arange(rows), n), torch.int32),
            cu_num_logits=put(cu, torch.int32),
            cu_num_logits_np=cu,
            query_start_loc=put(cu, torch.int32),
            seq_lens=put(np.full(n, start + rows), torch.int32),
            seq_lens_cpu_upper_bound=torch.full((n,), start + rows, dtype=torch.int32),
        )
        return self.tree_sampler(self.logits.repeat(n, 1), batch)


def chi_square(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """p-value of Pearson's test; outcomes expected fewer than five times are taken together."""
    total = sum(counts.values())
    assert set(counts) <= set(law), "a token that the target never chooses"
    cells, rest = [], [0.0, 0.0]
    for outcome, probability in law.items():
        cell = [float(counts.get(outcome, 0)), total * probability]
        if cell[1] < 5:
            rest = [a + b for a, b in zip(rest, cell, strict=True)]
        else:
            cells.append(cell)
    if rest[1] > 0:
        cells.append(rest)
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def draw(bench: Bench) -> dict[tuple[int, ...], int]:
    counts: dict[tuple[int, ...], int] = {}
    depth = max(bench.law.depths)
    for batch in range(NUM_BATCHES):
        output = bench.round(PREFIX + batch * (depth + 1))
        lens = output.num_sampled.tolist()
        assert (output.num_rejected == bench.law.budget + 1 - output.num_sampled).all()
        for tokens, length in zip(output.sampled_token_ids.tolist(), lens, strict=True):
            outcome = tuple(tokens[:length])
            counts[outcome] = counts.get(outcome, 0) + 1
    assert sum(counts.values()) == NUM_BATCHES * NUM_REQS >= 20_000
    return counts


@pytest.fixture
def quick_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device != "cpu":
        return
    from vllm.v1.worker.gpu.sample import sampler as vllm_sampler

    from vllm_ddtree.sampler import sampler as tree_sampler

    def get_num_sampled_and_rejected(
        num_sampled: torch.Tensor, seq_lens: Any, cu_num_logits: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return num_sampled, cu_num_logits.diff() - num_sampled

    monkeypatch.setattr(vllm_sampler, "gumbel_sample", vectorised_gumbel_sample)
    monkeypatch.setattr(tree_sampler, "walk", distinct_walk)
    monkeypatch.setattr(tree_sampler, "get_num_sampled_and_rejected", get_num_sampled_and_rejected)


def test_the_quick_kernels_give_what_vllms_give(
    device: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if device != "cpu":
        pytest.skip("the kernels themselves run there")
    for name, params in (("two-levels", {}), ("full", {"top_k": 2})):
        bench = Bench(LAWS[name], 40, device, **params)
        real = [bench.round(PREFIX + i) for i in range(2)]
        if not params:
            request.getfixturevalue("quick_kernels")
        quick = [bench.round(PREFIX + i) for i in range(2)]
        for a, b in zip(real, quick, strict=True):
            assert torch.equal(a.num_sampled, b.num_sampled)
            assert torch.equal(a.num_rejected, b.num_rejected)
            for i, length in enumerate(a.num_sampled.tolist()):
                assert torch.equal(a.sampled_token_ids[i, :length], b.sampled_token_ids[i, :length])
        monkeypatch.undo()


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("name", LAWS)
def test_emitted_tokens_follow_the_targets_law(device: str, name: str) -> None:
    law = LAWS[name]
    counts = draw(Bench(law, NUM_REQS, device))
    # The joint law of all emitted tokens; those of the first, and of the second given the first.
    assert chi_square(counts, law.outcomes(law.probs)) > 1e-3
    assert max(map(len, counts)) == max(law.depths) + 1
    vocab = law.probs.shape[1]
    first = {(t,): sum(n for o, n in counts.items() if o[0] == t) for t in range(vocab)}
    assert chi_square(first, {(t,): p for t, p in enumerate(law.probs[0])}) > 1e-3
    for child in range(1, law.budget + 1):
        if law.parents[child] == 0:
            after = {
                (t,): sum(n for o, n in counts.items() if o[:2] == (law.tokens[child], t))
                for t in range(vocab)
            }
            assert chi_square(after, {(t,): p for t, p in enumerate(law.probs[child])}) > 1e-3


@pytest.mark.usefixtures("quick_kernels")
def test_the_law_with_top_k_and_top_p(device: str) -> None:
    law = LAWS["siblings"]
    bench = Bench(law, NUM_REQS, device, top_k=3, top_p=0.85)
    probs = law.probs.copy()
    for row in probs:
        order = np.argsort(-row)
        row[order[3:]] = 0
        row /= row.sum()
        before = np.concatenate([[0], np.cumsum(row[order])[:-1]])
        row[order[before >= 0.85]] = 0
        row /= row.sum()
    assert set((probs == 0).sum(1)) == {2, 3}  # top_k alone, and top_p after it
    assert chi_square(draw(bench), law.outcomes(probs)) > 1e-3


@pytest.mark.usefixtures("quick_kernels")
def test_the_test_itself_rejects_the_ratio_rule(device: str) -> None:
    """Node 0 accepted with min(1, p / q), q = (.9, .08, .02), else a draw from max(p - q, 0)."""
    law = LAWS["one-node"]
    p, q = law.probs[0], np.array([0.9, 0.08, 0.02])
    accept = p[0] / q[0]
    rest = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    wrong = {(0,): accept, (1,): (1 - accept) * rest[1], (2,): (1 - accept) * rest[2]}
    counts = draw(Bench(law, NUM_REQS, device))
    first = {(t,): sum(n for o, n in counts.items() if o[0] == t) for t in range(3)}
    assert abs(first[0,] - 12_000) < 4 * (20_000 * 0.6 * 0.4) ** 0.5
    assert chi_square(first, wrong) < 1e-30


def test_seeded_requests_repeat_and_unseeded_differ(device: str) -> None:
    from vllm import SamplingParams

    law = Law([0, 0, 1], [0, 1, 2], [[0.25] * 4] * 4)
    bench = Bench(law, 24, device)
    for index in range(12):
        bench.sampler.add_request(index, SamplingParams(temperature=1.0, seed=11))
    bench.sampler.apply_staged_writes()
    seen: list[dict[int, tuple[int, ...]]] = []
    for _ in range(2):
        output = bench.round(PREFIX)
        indices = np.random.default_rng(PREFIX).permutation(24)
        tokens = zip(output.sampled_token_ids.tolist(), output.num_sampled.tolist(), strict=True)
        seen.append({int(i): tuple(t[:n]) for i, (t, n) in zip(indices, tokens, strict=True)})
    assert seen[0] == seen[1]
    assert len({seen[0][index] for index in range(12)}) == 1
    assert len({seen[0][index] for index in range(12, 24)}) > 3
