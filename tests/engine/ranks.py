# SPDX-License-Identifier: Apache-2.0
"""Whether an engine's ranks hold the same trees in every round, and what their drafts gather."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


def record(worker: Any) -> None:
    """Keep a digest of a worker's trees and walks after every round (sent to it as a function)."""
    rt = worker.model_runner.model_state.runtime
    worker.digests = digests = []
    publish, trees = rt.meter.publish, rt.trees
    parts = (trees.tokens, trees.parents, trees.depths, trees.masks, trees.num_nodes, trees.chains)

    def publish_and_record() -> None:
        publish()
        digest = hashlib.sha256()
        for part in (*parts, rt.paths.rows, rt.paths.lens, rt.meter.totals):
            digest.update(part.cpu().numpy().tobytes())
        digests.append(digest.hexdigest())

    rt.meter.publish = publish_and_record


def recorded(worker: Any) -> tuple[int, int, list[str]]:
    """(rank, ranks, digest after each round since the last call)."""
    from vllm.distributed import parallel_state

    digests = list(worker.digests)
    worker.digests.clear()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return rank, parallel_state.get_tensor_model_parallel_world_size(), digests


def rounds(llm: LLM) -> int:
    """Number of rounds since the last call, of which both ranks hold the same trees."""
    (rank, ranks, one), (other_rank, _, other) = llm.collective_rpc(recorded)
    assert (rank, other_rank, ranks) == (0, 1, 2)
    assert one == other
    assert len(set(one)) == len(one), "the digest misses what changes"
    return len(one)


def watch_gathers(worker: Any) -> None:
    """Keep the shape of everything a worker's draft gathers from the ranks (without graphs)."""
    from vllm.distributed import parallel_state

    group, speculator = parallel_state.get_tp_group(), worker.model_runner.speculator
    gathers: list[list[tuple[tuple[int, ...], int]]] = []
    worker.gathers = gathers
    all_gather, draft = group.all_gather, speculator._generate_draft

    def all_gather_and_tell(tensor: Any, *args: Any) -> Any:
        gathers[-1].append((tuple(tensor.shape), tensor.nbytes))
        return all_gather(tensor, *args)

    def draft_and_watch(*args: Any, **kwargs: Any) -> None:
        gathers.append([])
        group.all_gather = all_gather_and_tell
        draft(*args, **kwargs)
        group.all_gather = all_gather

    speculator._generate_draft = draft_and_watch


def gathered(worker: Any) -> list[list[tuple[tuple[int, ...], int]]]:
    """Of each draft since `watch_gathers`: shape and bytes of each tensor gathered."""
    return list(worker.gathers)


def both_heads(worker: Any) -> tuple[str, bool, float, str]:
    """The draft head's form against the logits of all: its name, whether ids are the same, the
    largest difference of a log-prob, to itself if that is large, a digest of what it gave.

    Random rows in the drafter's dtype, a row of ties alone and one of NaN.
    """
    import torch

    from vllm_ddtree.proposer.head import WholeHead

    speculator = worker.model_runner.speculator
    rows, top_k = 12, speculator.runtime.top_k
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, speculator.hidden_size, generator=generator)
    hidden[3], hidden[5] = 0.0, float("nan")
    hidden = hidden.to(speculator.device, speculator.dtype)
    results = []
    for head in (speculator.head, WholeHead(speculator.model, rows, top_k)):
        log_probs = torch.full((rows, top_k), 7.0, device=hidden.device)
        ids = torch.full((rows, top_k), -9, device=hidden.device)
        with torch.inference_mode():
            head.top_k(hidden, log_probs, ids)
        results.append((log_probs.cpu(), ids.cpu()))
    (log_probs, ids), (wanted, wanted_ids) = results
    there = wanted > float("-inf")
    assert torch.equal(log_probs > float("-inf"), there) and int(there.sum()) == (rows - 1) * top_k
    assert ids[3].tolist() == list(range(top_k))
    digest = hashlib.sha256(log_probs.numpy().tobytes() + ids.numpy().tobytes())
    difference = float(((log_probs - wanted).abs() / (1 + wanted.abs()))[there].max())
    name = type(speculator.head).__name__
    return name, torch.equal(ids, wanted_ids), difference, digest.hexdigest()


def check_heads(llm: LLM) -> None:
    """Both ranks draft from shards: the candidates of the whole, the same bits on both."""
    one, other = llm.collective_rpc(both_heads)
    assert one == other
    name, same_ids, difference, _ = one
    assert name == "ShardedHead" and same_ids and difference < 1e-6
