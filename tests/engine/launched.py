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

BUDGETS = (63, 31, 23, 15, 11, 7, 5, 3, 1, 0)
TOKENS = 40
ENGINE: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "external_launcher",
    "block_size": 32,
    "max_num_seqs": 4,
    "max_model_len": 160,
    "kv_cache_memory_bytes": 8 << 20,
}


def differ(rank: int) -> None:
    """Give this rank times that no other rank measures.

    Each rank prefers another budget by its measurement at start, and its clock is noise.
    """
    from vllm_ddtree.budget import auto, cost

    noise = random.Random(rank)
    favourite = (3, 7)[rank]

    def measured(worker: Any) -> cost.Costs:
        times = {
            (b + 1, n): 10.0 + 0.02 * b * n - (4.0 if b == favourite else 0.0)
            for b in BUDGETS
            for n in (1, 2, 4)
        }
        return cost.Costs(times)

    now = itertools.accumulate(noise.choice((0.004, 0.009, 0.02)) for _ in itertools.count())
    cost.measure = measured
    auto.time = SimpleNamespace(perf_counter=lambda: next(now))  # type: ignore[assignment]
    auto.READ_EVERY, auto.READ_AFTER, auto.SAY_EVERY = 6, 3, noise.choice((0.0, 0.05))


def main(target: str, drafter: str, folder: str) -> None:
    from tests.engine.ranks import record, recorded

    rank = int(os.environ["RANK"])
    budget = os.environ.get("BUDGET", "auto")
    differ(rank)
    spec: dict[str, Any] | None = {"method": "ddtree", "model": drafter, "budget": budget}
    if budget != "auto":
        spec = None if budget == "none" else {**(spec or {}), "budget": int(budget)}
    with open_engine(target, spec, **ENGINE) as llm:
        chosen: list[Any] = []
        digests: list[str] = []
        if spec is not None:
            llm.collective_rpc(record)
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            schedule = scheduler.schedule

            def noted(*args: Any, **kwargs: Any) -> Any:
                output = schedule(*args, **kwargs)
                chosen.append(
                    [output.num_spec_tokens_to_schedule, *output.num_scheduled_tokens.values()]
                )
                return output

            scheduler.schedule = noted
        params = [greedy(TOKENS), greedy(TOKENS, temperature=0.8, seed=3), greedy(TOKENS // 2)]
        result = generate(llm, [PROMPTS[0], PROMPTS[3], PROMPTS[5]], params)
        if spec is not None:
            digests = llm.collective_rpc(recorded)[0][2]
    found = {"tokens": result.token_ids, "chosen": chosen, "digests": digests}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
