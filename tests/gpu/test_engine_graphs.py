# SPDX-License-Identifier: Apache-2.0
"""In each of vLLM's modes of CUDA graphs the texts are the target's own, with requests that come
and go while graphs are replayed.

All engines serve the same mix, more requests than fit at once; one judge reads all their texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Pair
from tests.gpu.engines import GRAPHS, Served, check_gaps, gaps, serve, spec

SHARE = 0.15
"""gpu_memory_utilization of the engine that sizes its own KV cache."""
# name -> (budget, engine arguments, whether whole verify steps are graphs)
MODES: dict[str, tuple[int | str | list[list[int]], dict[str, Any], bool]] = {
    "default": (15, {}, True),
    "piecewise": (15, {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, False),
    "full": (31, {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}, True),
    # Graphs for 1, 2 and 6 requests; 7 have none.
    "sizes": (
        15,
        {
            "max_num_seqs": 7,
            "compilation_config": {
                **GRAPHS["compilation_config"],
                "cudagraph_capture_sizes": [16, 32, 96],
            },
        },
        True,
    ),
    # As many reaches of the draft as there can be.
    "schedule": ([[1, 2, 15], [3, 4, 7], [5, 6, 3]], GRAPHS, True),
    # Now and then nothing is drafted, and the drafter's context follows the text all the same.
    "pauses": ([[1, 2, 15], [3, 4, 0], [5, 6, 15]], GRAPHS, True),
    "eager": (31, {"enforce_eager": True}, False),
    "auto": (
        "auto",
        {**GRAPHS, "kv_cache_memory_bytes": None, "gpu_memory_utilization": SHARE},
        True,
    ),
}
Runs = dict[str, "Served | Exception"]


@pytest.fixture(scope="module")
def runs(small_pair: Pair) -> Iterator[Runs]:
    """What each mode's engine did; one that fails must not take the others' results."""
    served: Runs = {}
    for mode, (budget, engine, _) in MODES.items():
        try:
            served[mode] = serve(small_pair, spec(small_pair, budget), **engine)
        except Exception as error:
            served[mode] = error
    yield served


def run_of(runs: Runs, mode: str) -> Served:
    run = runs[mode]
    if isinstance(run, Exception):
        raise run
    return run


@pytest.mark.parametrize("mode", MODES)
def test_served(runs: Runs, mode: str) -> None:
    run = run_of(runs, mode)
    counters = run.result.counters
    print(mode, counters.acceptance_length, dict(run.replays), dict(run.drafts))
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    for output in run.result.outputs:
        assert output.outputs[0].finish_reason == "length"
    whole_steps = MODES[mode][2]
    assert bool(run.replays) == whole_steps
    if whole_steps:
        assert len({running for _, running in run.replays}) >= 3, "batches of one size only"


def test_batches_between_captured_sizes(runs: Runs) -> None:
    run = run_of(runs, "sizes")
    assert {graph for graph, _ in run.replays} <= {1, 2, 6}
    assert {(6, 3), (6, 4), (6, 5)} & set(run.replays), "no padded batch"
    assert max(running for _, running in run.replays) <= 6


def test_drafts_of_each_reach_are_graphs(runs: Runs) -> None:
    assert set(run_of(runs, "schedule").drafts) == {15, 7, 3}
    assert set(run_of(runs, "default").drafts) == {15}


def test_drafts_go_on_where_they_paused(runs: Runs) -> None:
    """A context with holes would leave the texts right, and few drafts accepted."""
    pauses, default = run_of(runs, "pauses"), run_of(runs, "default")
    assert pauses.drafts[0] > 20 and pauses.drafts[15] > 20
    lengths = [run.result.counters.acceptance_length for run in (pauses, default)]
    print("acceptance with pauses and without:", lengths)
    assert lengths[0] > 0.9 * lengths[1]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "eager"])
def test_no_kernel_is_compiled_while_serving(runs: Runs, mode: str) -> None:
    assert run_of(runs, mode).compiled == []


def test_graphs_are_within_the_memory_asked_for(runs: Runs) -> None:
    used = run_of(runs, "auto").used
    print("share of the GPU's memory:", used)
    # vLLM leaves the KV cache what the measured rest does not take; it estimates the graphs.
    assert 0.5 * SHARE < used < SHARE + 0.005


def test_texts_are_the_targets_own(runs: Runs, small_pair: Pair) -> None:
    texts = {mode: run.judged for mode, run in runs.items() if isinstance(run, Served)}
    assert texts
    check_gaps(gaps(small_pair, [text for judged in texts.values() for text in judged]))
