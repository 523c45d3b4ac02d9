# SPDX-License-Identifier: Apache-2.0
"""What growing a tree over a lattice costs, in microseconds.

usage: python -m benchmarks.lattice --out FOLDER [--budgets 7 15 31 63 127] [--batches 1 8 32 128]
           [--depth 15] [--top-k 16]

Each case is replayed from a CUDA graph of many calls, as in benchmarks/kernels.py. Writes
lattice.json and lattice.md. Columns:

unary          the tree of a drafter without conditions, of the same candidates
lattice        rankings and tree, as a round calls them
rank           the rankings alone
tree           lattice less rank
not touched    lattice, where the builder reads nothing ahead
log-probs      log-probs of the lattice from a candidate head's raw scores
DFlash2, DSpark    raw scores of these candidate heads, of hidden 4096 and rank 256

Every tree is checked against the reference on the way.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.kernels import microseconds
from vllm_ddtree.proposer.scores import conditional_log_probs, markov_bias
from vllm_ddtree.round.meter import Meter
from vllm_ddtree.round.trees import TreeBuffers
from vllm_ddtree.tree import lattice
from vllm_ddtree.tree.build import build_trees
from vllm_ddtree.tree.lattice_reference import build_lattice_tree

COLUMNS = ["unary", "lattice", "rank", "tree", "not touched", "log-probs", "DFlash2", "DSpark"]
CALLS = 20
HIDDEN, RANK, VOCAB = 4096, 256, 151936


class Case:
    """One round of random scores: a few likely candidates a position, as drafters give."""

    def __init__(self, budget: int, batch: int, depth: int, top_k: int, device: str) -> None:
        torch.manual_seed(0)
        self.depth = depth = min(depth, budget)
        self.budget, self.batch = budget, batch

        def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        unary = (3 * randn(batch, depth, top_k)).sort(-1, descending=True).values
        self.unary = unary.log_softmax(-1) - 0.05
        self.scores = unary[:, :, None] + 2 * randn(batch, depth, top_k, top_k)
        self.log_probs = torch.empty_like(self.scores)
        self.ids = torch.randint(VOCAB, (batch, depth, top_k), device=device)
        self.indices = torch.arange(batch, device=device)
        self.trees = TreeBuffers(batch, budget, device)
        self.drafts = torch.zeros(batch, budget, dtype=torch.int64, device=device)
        self.rankings = lattice.Rankings(batch, depth, top_k, device)
        self.meter = Meter(budget, torch.device(device))
        half = torch.bfloat16
        self.predecessors = randn(VOCAB, RANK, dtype=half)
        self.successors = randn(VOCAB, RANK, dtype=half)
        self.hidden = randn(batch, depth, RANK, dtype=half)
        self.anchors = torch.randint(VOCAB, (batch,), device=device)

    def normalise(self) -> None:
        conditional_log_probs(self.scores, self.unary, self.log_probs)

    def lattice(self) -> None:
        lattice.build_lattice_trees(
            self.log_probs,
            self.ids,
            self.indices,
            self.trees,
            self.drafts,
            self.depth,
            self.rankings,
            self.meter.built,
        )

    def unary_tree(self) -> None:
        build_trees(
            self.unary,
            self.ids,
            self.indices,
            self.trees,
            self.drafts,
            self.depth,
            self.meter.built,
        )

    def dflash2(self) -> None:
        """The arithmetic of vLLM's `CandidateSelector`, its projection left out."""
        before = torch.cat(
            (self.anchors[:, None, None].expand(-1, 1, self.ids.shape[2]), self.ids[:, :-1]), dim=1
        )
        torch.einsum(
            "blpr,blcr->blpc",
            self.predecessors[before] * self.hidden[:, :, None],
            self.successors[self.ids],
        )

    def dspark(self) -> None:
        """The table of `dspark_draft`, without the draft head and the candidates."""
        markov_bias(self.predecessors[self.ids], self.successors[self.ids], 1.0, None)

    def check(self) -> None:
        """Raise AssertionError unless the first request's tree is the reference's."""
        self.lattice()
        tree = build_lattice_tree(
            self.log_probs[0].cpu().numpy(), self.ids[0].cpu().numpy(), self.budget, self.depth
        )
        assert self.drafts[0, : tree.num_nodes].tolist() == tree.tokens[1:].tolist()
        assert self.trees.parents[0, : tree.num_nodes + 1].tolist() == tree.parents.tolist()


def measure(case: Case, time: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """Every column of one size.

    Args:
        case: whose parts are timed.
        time: gives the microseconds of a call.

    """
    case.normalise()
    case.check()
    row = {"unary": time(case.unary_tree), "lattice": time(case.lattice)}
    # Without the second kernel the rankings alone are left.
    build = lattice._build_lattice_trees_kernel
    try:
        lattice._build_lattice_trees_kernel = _Nothing()
        row["rank"] = time(case.lattice)
    finally:
        lattice._build_lattice_trees_kernel = build
    row["tree"] = row["lattice"] - row["rank"]
    touched = lattice.TOUCHED
    try:
        lattice.TOUCHED = 1
        row["not touched"] = time(case.lattice)
    finally:
        lattice.TOUCHED = touched
    row["log-probs"] = time(case.normalise)
    row["DFlash2"] = time(case.dflash2)
    row["DSpark"] = time(case.dspark)
    return row


class _Nothing:
    """Stands for a kernel and launches none."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def table_of(results: list[dict[str, float]]) -> str:
    """Markdown table of the measurements."""
    head = ["batch", "budget", *COLUMNS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in results:
        cells = [f"{row['batch']:.0f}", f"{row['budget']:.0f}"]
        cells += [f"{row[name]:.1f}" for name in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", type=int, nargs="+", default=[7, 15, 31, 63, 127])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    info = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "depth": args.depth,
        "top_k": args.top_k,
    }
    results: list[dict[str, float]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    for batch, budget in itertools.product(args.batches, args.budgets):
        case = Case(budget, batch, args.depth, args.top_k, "cuda")
        row = {"batch": batch, "budget": budget}
        row |= measure(case, lambda call: microseconds(call, CALLS))
        results.append(row)
        print({name: round(value, 1) for name, value in row.items()}, flush=True)
        report = {"info": info, "microseconds": results}
        (args.out / "lattice.json").write_text(json.dumps(report, indent=1))
        text = f"{info['gpu']}, PyTorch {info['torch']}\n\n"
        text += f"Microseconds a round, depth {args.depth}, {args.top_k} candidates.\n\n"
        (args.out / "lattice.md").write_text(text + table_of(results) + "\n")
    print(table_of(results))


if __name__ == "__main__":
    main()
