# SPDX-License-Identifier: Apache-2.0
"""One rank of an engine that was started with torchrun; see test_external_launcher.py.

usage: torchrun --nproc-per-node 2 -m tests.engine.launched TARGET DRAFTER FOLDER

Every rank has a scheduler, a clock and measured times of its own, all made to differ here. Writes
FOLDER/RANK.json: the tokens of each request, the (nodes, chain) chosen at each step, and a digest
of the trees after every round.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.engine.harness import PROMPTS, generate, greedy, open_engine
from vllm_ddtree.budget.cost import Costs
from vllm_ddtree.budget.tiers import TIERS

TOKENS = 28
ONE_RANK: dict[str, Any] = {
    "block_size": 32,
    "max_num_seqs": 4,
    "max_model_len": 160,
    "kv_cache_memory_bytes": 8 << 20,
}
ENGINE: dict[str, Any] = {
    **ONE_RANK,
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "external_launcher",
}


def requests() -> tuple[list[str], list[Any]]:
    """Prompts and their parameters."""
    params = [greedy(TOKENS), greedy(TOKENS, temperature=0.8, seed=3), greedy(TOKENS // 2)]
    return [PROMPTS[0], PROMPTS[3], PROMPTS[5]], params


def costs_of(rank: int) -> Costs:
    """What a rank measures at start: each prefers another budget."""
    favourite = (3, 7)[rank]
    return Costs(
        {
            (b + 1, n): 10.0 + 0.02 * b * n - (4.0 if b == favourite else 0.0)
            for b in TIERS
            for n in (1, 2, 4)
        }
    )


def differ(rank: int) -> None:
    """Give this rank times that no other rank measures, and a clock that is noise."""
    from vllm_ddtree.budget import auto, cost

    noise = random.Random(rank)
    cost.measure = lambda worker: costs_of(rank)
    now = itertools.accumulate(noise.choice((0.004, 0.009, 0.02)) for _ in itertools.count())
    auto.time = SimpleNamespace(perf_counter=lambda: next(now))  # type: ignore[assignment]
    auto.READ_EVERY, auto.READ_AFTER, auto.SAY_EVERY = 6, 3, noise.choice((0.0, 0.05))


def main(target: str, drafter: str, folder: str) -> None:
    from tests.engine.ranks import record, recorded

    rank = int(os.environ["RANK"])
    differ(rank)
    spec = {"method": "ddtree", "model": drafter, "budget": "auto"}
    with open_engine(target, spec, **ENGINE) as llm:
        llm.collective_rpc(record)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule, chosen = scheduler.schedule, []

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            lengths = output.num_scheduled_tokens.values()
            chosen.append([output.num_spec_tokens_to_schedule, *lengths])
            return output

        scheduler.schedule = noted
        result = generate(llm, *requests())
        digests = llm.collective_rpc(recorded)[0][2]
    found = {"tokens": result.token_ids, "chosen": chosen, "digests": digests}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
