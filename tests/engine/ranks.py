# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of an engine hold the same trees in every round."""

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
    parts = (trees.tokens, trees.parents, trees.depths, trees.masks, trees.num_nodes, trees.spines)

    def publish_and_record() -> None:
        publish()
        digest = hashlib.sha256()
        for part in (*parts, rt.path_rows, rt.path_lens, rt.meter.counts):
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
