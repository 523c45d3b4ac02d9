# SPDX-License-Identifier: Apache-2.0
"""Each round's draft has the reach that it needs, and what belongs to a reach is there."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_ddtree.budget.tiers import SCHEDULE, TIERS
from vllm_ddtree.graphs.draft import ContextGraphManager, DraftGraphManager
from vllm_ddtree.graphs.sizes import context_sizes
from vllm_ddtree.proposer import speculator
from vllm_ddtree.proposer.reach import context_alone, draft_reaches, make_narrow, make_reaches
from vllm_ddtree.proposer.speculator import DDTreeSpeculator

NUM_REQS, TOP_K = 40, 4
DEVICE = torch.device("cpu")


@pytest.mark.parametrize(
    ("depth", "budgets", "positions"),
    [
        (15, [31], [15]),
        (15, [7], [7]),
        (15, [5], [5]),
        (4, [31], [4]),
        (15, TIERS, [15, 7, 3]),
        (7, TIERS, [7, 3]),
        (3, TIERS, [3]),
        (15, [31, 7], [15, 7]),
        (15, [31, 8, 2], [15, 3]),  # 8 nodes are not in 7 positions
        (15, [5, 4, 1], [5, 3]),
        (2, [9, 1, 0], [2]),
    ],
)
def test_positions(depth: int, budgets: list[int], positions: list[int]) -> None:
    assert draft_reaches(depth, budgets) == positions


def test_auto_begins_with_its_reaches() -> None:
    assert {budget for _, _, budget in SCHEDULE} <= set(TIERS)


def test_reaches_share_their_storage() -> None:
    reaches = make_reaches([15, 7, 3], NUM_REQS, TOP_K, DEVICE)
    for reach in reaches:
        for values in (reach.log_probs, reach.token_ids):
            assert values.shape == (NUM_REQS, reach.positions, TOP_K)
            assert values[:5].is_contiguous()
        assert reach.context.rows == reach.positions + 1
    assert len({reach.log_probs.data_ptr() for reach in reaches}) == 1
    assert len({reach.token_ids.data_ptr() for reach in reaches}) == 1


def made(auto: bool, positions: list[int], depth: int = 15) -> Any:
    """A speculator with what its reaches need."""
    made = object.__new__(DDTreeSpeculator)
    made.reaches = make_reaches(positions, NUM_REQS, TOP_K, DEVICE)
    made.context_alone = context_alone(NUM_REQS, DEVICE) if auto else None
    step = SimpleNamespace(max_verify_len=0)
    made.runtime = SimpleNamespace(  # type: ignore[assignment]
        max_depth=depth, step=step, narrow_asked=False
    )
    made.speculative_config = SimpleNamespace(auto_budget=auto, block_size=16)
    made.narrow = make_narrow(made.reaches, 16) if auto else None
    made.sample_from_anchor = False
    made._drafts = 0
    return made


@pytest.mark.parametrize(
    ("verified", "drafted", "positions"),
    [
        (0, 63, 15),
        (0, 8, 15),
        (0, 7, 7),
        (0, 3, 3),
        (0, 0, 3),
        (63, 3, 15),  # paths of 15 follow
        (7, 1, 7),
        (4, 0, 7),
        (3, 5, 7),
        (3, 3, 3),
        (0, None, 15),
    ],
)
def test_a_round_takes_the_shortest_that_holds_both(
    verified: int, drafted: int | None, positions: int
) -> None:
    drafts = made(False, [15, 7, 3])
    drafts.runtime.step.max_verify_len = verified + 1 if verified else 0
    for _ in range(2 * speculator.LONGEST_EVERY):  # a schedule has no turn of the longest
        assert drafts._choose_reach(drafted, False).positions == positions


def test_the_first_draft_after_plain_decoding_is_of_the_longest() -> None:
    """Trees of every size are estimated from it."""
    drafts = made(True, [15, 7, 3])
    for _ in range(3):
        assert drafts._choose_reach(1, dummy_run=False).positions == 15
    drafts.runtime.step.max_verify_len = 2
    assert drafts._choose_reach(1, dummy_run=False).positions == 3


def test_auto_has_a_turn_of_the_longest() -> None:
    drafts, every = made(True, [15, 7, 3]), speculator.LONGEST_EVERY
    drafts.runtime.step.max_verify_len = 4
    chosen = []
    for _ in range(2 * every):
        # Neither is a draft.
        assert drafts._choose_reach(3, dummy_run=True).positions == 3
        assert drafts._choose_reach(0, dummy_run=False).positions == 3
        chosen.append(drafts._choose_reach(3, dummy_run=False).positions)
    assert chosen == 2 * [15, *(every - 1) * [3]]


def test_a_narrow_draft_where_it_is_asked_for_and_holds_both() -> None:
    drafts = made(True, [15, 7, 3])
    assert drafts.narrow.masks == 7 and drafts.narrow.manager != drafts.reaches[1].manager
    drafts.runtime.narrow_asked, drafts._drafts = True, 1
    for verified, drafted, narrow in ((3, 3, True), (7, 7, True), (7, 1, True), (15, 3, False)):
        drafts.runtime.step.max_verify_len = verified + 1
        assert (drafts._choose_reach(drafted, False) is drafts.narrow) == narrow
    drafts.runtime.step.max_verify_len = 4
    assert drafts._choose_reach(11, False).positions == 15
    assert drafts._choose_reach(3, dummy_run=True) is drafts.narrow  # it is measured
    drafts.runtime.narrow_asked = False
    assert drafts._choose_reach(3, False).masks is None
    for reach in drafts._with_graphs():
        setattr(drafts, reach.manager, None)
    with drafts._drafting(drafts.narrow):
        assert (drafts.num_query_per_req, drafts.num_speculative_steps) == (8, 7)
    assert (drafts.num_query_per_req, drafts.num_speculative_steps) == (16, 15)


def test_where_there_are_no_narrow_drafts() -> None:
    assert make_narrow(make_reaches([7, 3], NUM_REQS, TOP_K, DEVICE), 8) is None
    assert make_narrow(make_reaches([15, 3], NUM_REQS, TOP_K, DEVICE), 16) is None


class Graphs:
    """A stand-in for a reach's graph manager: what the speculator is while it captures."""

    def __init__(self, drafts: Any, seen: list[tuple[int, ...]]) -> None:
        self.drafts, self.seen = drafts, seen

    def capture(self, generate: Any, *args: Any, prepare_forward: Any, **kwargs: Any) -> None:
        drafts = self.drafts
        assert drafts.query_cudagraph_manager is self
        self.seen.append(
            (
                drafts.reach.positions,
                drafts._num_graph_context_tokens(2),
                drafts.num_query_per_req,
            )
        )


@pytest.mark.parametrize("auto", [False, True])
def test_graphs_of_each_reach_are_captured(auto: bool) -> None:
    drafts = made(auto, [15, 7, 3])
    seen: list[tuple[int, ...]] = []
    for reach in drafts._with_graphs():
        setattr(drafts, reach.manager, Graphs(drafts, seen))
    drafts.num_query_per_req = 16
    buffers = torch.zeros(4, dtype=torch.int64)
    drafts.sample_indices = drafts.sample_pos = drafts.sample_idx_mapping = buffers
    drafts._context_slot_mappings = buffers
    drafts.max_num_tokens = 8192
    vars(drafts)["max_model_len"] = 512  # vLLM 0.33 has it from the model's configuration
    for name in ("input_buffers", "block_tables", "attn_groups", "kv_cache_config"):
        setattr(drafts, name, None)
    drafts._group_causal = False
    drafts.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=512))
    drafts.capture()
    # The context alone has a row a request.
    usual = [(15, 32, 16), (7, 16, 16), (3, 8, 16)]
    assert seen == [*usual, (7, 16, 8), (0, 2, 16)][: 5 if auto else 3]
    # Between drafts vLLM sees the longest.
    assert drafts.reach is drafts.reaches[0]
    assert drafts.query_cudagraph_manager is drafts.query_cudagraph_manager_15


def test_each_reach_has_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cudagraph_utils,
        "get_pp_group",
        lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
    )
    # Its choice of mode is not of interest.
    monkeypatch.setattr(
        DFlashSpeculator,
        "init_cudagraph_manager",
        lambda self, mode: setattr(
            self, "query_cudagraph_manager", SimpleNamespace(cudagraph_mode=mode)
        ),
    )
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None)
    scheduler = SimpleNamespace(max_num_seqs=NUM_REQS, max_num_batched_tokens=8192)
    drafts = made(False, [15, 7, 3])
    drafts.device, drafts.num_query_per_req = DEVICE, 16
    spec = drafts.speculative_config
    spec.depth_limit, spec.block_size, spec.budget, spec.family = 15, 16, 31, "DFlash"
    spec.uses_dynamic_speculative_decoding = lambda: False
    rt = drafts.runtime
    rt.top_k, rt.num_rows, rt.attention_words, rt.state_words = TOP_K, 32, "", ""
    drafts._schedule = [(1, 4, 31), (5, 40, 3)]
    drafts.draft_model_config = SimpleNamespace(model="drafter")
    drafts.vllm_config = SimpleNamespace(
        scheduler_config=scheduler,
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[1, 32, 512], max_cudagraph_capture_size=512
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        speculative_config=spec,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    drafts.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    # As vLLM looks for what it must drop after it has measured graphs.
    found = {value for value in vars(drafts).values() if isinstance(value, DraftGraphManager)}
    assert found == {getattr(drafts, reach.manager) for reach in drafts.reaches} and len(found) == 3
    assert drafts.query_cudagraph_manager is drafts.query_cudagraph_manager_15
    for reach in drafts.reaches:
        manager = getattr(drafts, reach.manager)
        queries = 16  # the whole block, whatever is looked at
        manager._graphs_captured = True
        for num_reqs, graph in ((1, 1), (3, 4), (17, 24), (NUM_REQS, NUM_REQS)):
            desc = manager.dispatch(num_reqs, num_reqs * queries, queries, 0)
            assert desc.cg_mode == CUDAGraphMode.FULL
            assert (desc.num_reqs, desc.num_tokens) == (graph, graph * queries)


def test_the_context_alone_has_few_graphs_for_all_requests() -> None:
    for limit, tokens in ((40, 8192), (300, 8192), (1000, 8192), (7, 64)):
        sizes = context_sizes(16, limit, tokens)
        most = min(limit, tokens // 16)
        assert sizes[-1] == 16 * most and len(sizes) < 22
        for num_reqs in range(1, most + 1):
            assert min(size for size in sizes if size >= 16 * num_reqs) < 2 * 16 * num_reqs


@pytest.mark.parametrize(
    ("nodes", "tokens", "captured", "ranks", "graph"),
    [
        (0, 3, [2, 4], 1, True),
        (0, 5, [2, 4], 1, False),  # more than there is a graph for
        (0, 3, [], 1, False),
        (0, 3, [2, 4], 2, False),  # ranks of data parallelism would have to agree
        (1, 3, [2, 4], 1, False),
        (0, 9, [2, 4], 1, False),  # a request has more than one row
    ],
)
def test_a_step_that_drafts_nothing_replays_the_context_alone(
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    tokens: int,
    captured: list[int],
    ranks: int,
    graph: bool,
) -> None:
    seen: list[tuple[int, Any]] = []
    desc = namedtuple("desc", "num_tokens")

    def propose(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((self.reach.positions, kwargs["num_speculative_tokens"]))
        # What vLLM captures of it, or runs: nothing is drafted.
        if self.reach.positions == 0:
            assert self._build_uniform_attn_metadata(num_reqs=3) == {}
            self._generate_draft(3, 48, None, None, None)

    monkeypatch.setattr(DFlashSpeculator, "propose", propose)
    drafts = made(True, [15, 7, 3])
    drafts.dp_size, drafts.num_query_per_req = ranks, 16
    drafts._aux_staging = torch.zeros(1)
    drafts.tree_tokens = torch.zeros(NUM_REQS, 63)
    for reach in drafts._with_graphs():
        manager = object.__new__(ContextGraphManager)
        manager.decode_query_len = 16
        manager.graphs = {desc(16 * n): None for n in captured}
        setattr(drafts, reach.manager, manager)
    published: list[None] = []
    drafts.runtime.meter = SimpleNamespace(publish=lambda: published.append(None))
    drafts.runtime.step.verified = False
    batch = SimpleNamespace(num_reqs=min(tokens, 5), num_tokens=tokens)
    none = torch.zeros(0)
    drafts.propose(batch, {}, {}, none, [none], none, none, num_speculative_tokens=nodes)
    assert seen == [(0, None) if graph else (3 if nodes == 0 else 15, nodes)]
    assert published
