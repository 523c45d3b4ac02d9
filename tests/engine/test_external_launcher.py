# SPDX-License-Identifier: Apache-2.0
"""torchrun with two ranks: each has its own scheduler, and all must choose alike.

The ranks' measured times and clocks are made to differ (`launched.py`). What depends on them is
decided by the first rank for all: the ranks choose the same budgets, hold the same trees, and give
the tokens of plain decoding.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import NANO
from tests.engine.harness import run_engine
from tests.engine.launched import ONE_RANK, costs_of, requests
from vllm_ddtree.budget.auto import AutoBudget


@contextmanager
def shared_memory() -> Iterator[None]:
    """vLLM's CPU ranks meet in shared memory, which has one name for all that torchrun starts."""
    with Path(tempfile.gettempdir(), "ddtree-torchrun.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in Path("/dev/shm").glob("-tp:*-cpushm_*"):
            left.unlink()  # of a run that was killed
        yield


def launch(folder: Path) -> list[dict[str, Any]]:
    """What the two ranks wrote."""
    with shared_memory():
        return _launch(folder)


def _launch(folder: Path) -> list[dict[str, Any]]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "tests.engine.launched"),
            *(str(NANO.target), str(NANO.drafter), str(folder)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_all_ranks_choose_alike(tmp_path: Path) -> None:
    plain = run_engine(NANO.target, None, *requests(), **ONE_RANK).token_ids
    one, other = launch(tmp_path)
    assert one["chosen"] == other["chosen"]
    assert one["tokens"] == other["tokens"] == plain
    assert one["digests"] == other["digests"] and len(one["digests"]) > 10
    # Each rank alone would choose another budget.
    assert [AutoBudget(costs_of(rank), 4, 7).choice(3).nodes for rank in range(2)] == [3, 7]
    assert one["chosen"][0][0] == 3
