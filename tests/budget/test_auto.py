# SPDX-License-Identifier: Apache-2.0
"""`auto` chooses the budget with the most expected tokens a measured millisecond."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.budget.test_acceptance import Rounds
from vllm_ddtree.budget import cost
from vllm_ddtree.budget.acceptance import Acceptance
from vllm_ddtree.budget.auto import (
    READ_AFTER,
    READ_EVERY,
    AutoBudget,
    Choice,
    Watch,
    attach,
)
from vllm_ddtree.budget.cost import CHAIN, FAR_RUN, Costs, lowered, measurable
from vllm_ddtree.budget.tiers import TIERS
from vllm_ddtree.integration import observe_steps
from vllm_ddtree.patches import scheduler as patches
from vllm_ddtree.round.marks import asks_for_chains
from vllm_ddtree.round.meter import read_meter


def machine(knee: int) -> Costs:
    """A machine whose round takes 6 ms up to `knee` rows and grows in proportion beyond."""
    counts = (1, 2, 4, 8, 16, 32, 64, 128)
    return Costs(
        {
            (budget + 1, n): 6.0 * max(1.0, (budget + 1) * n / knee)
            for budget in TIERS
            for n in counts
            if (budget + 1) * n <= 512
        }
    )


def test_budget_falls_with_load() -> None:
    auto = AutoBudget(machine(knee=160), max_num_seqs=128)
    chosen = [auto[n] for n in (1, 4, 16, 64, 128)]
    assert chosen == sorted(chosen, reverse=True)
    assert auto[1] == 63
    assert auto[128] <= 3
    assert len(auto) == 129
    assert auto.ranges()[0][0] == 1 and auto.ranges()[-1][1] == 128


def test_padding_counts() -> None:
    # Five requests run in the graph of eight.
    costs = Costs({(32, 4): 6.0, (32, 8): 20.0, (8, 4): 6.0, (8, 8): 6.0})
    auto = AutoBudget(costs, max_num_seqs=8)
    assert auto[4] == 31 and auto[5] == 7


def test_no_graph_no_choice_but_the_neighbours() -> None:
    auto = AutoBudget(Costs({(8, 4): 6.0}), max_num_seqs=16)
    assert {auto[n] for n in range(1, 17)} == {7}


def test_useless_drafts_stop() -> None:
    # Plain decoding costs 5 ms, a round at least 6: a drafter that is never right does not pay.
    costs = machine(knee=160)
    costs.rounds |= {(1, n): 5.0 for n in (1, 2, 4, 8, 16, 32, 64, 128)}
    auto = AutoBudget(costs, max_num_seqs=128)
    assert auto[1] > 0
    nothing = Rounds(64, [1.0] + [0.3] * 63, [1.0] + [0.0] * 63)
    auto.acceptance.update(nothing.verify(63, 3000), 0.0)
    auto.refresh(0.0)
    assert auto[1] == 0 and auto[128] == 0


def test_good_drafts_raise_the_budget() -> None:
    auto = AutoBudget(machine(knee=160), max_num_seqs=128)
    before = auto[16]
    flat = [1.0] + [0.6] * 63  # every further node is worth as much
    auto.acceptance.update(Rounds(64, flat, flat).verify(7, 3000), 0.0)
    auto.refresh(0.0)
    assert auto[16] > before


def test_small_differences_do_not_switch() -> None:
    costs = Costs({(64, 1): 6.05, (32, 1): 6.0})
    auto = AutoBudget(costs, max_num_seqs=1)
    first = auto[1]
    other = {63: 31, 31: 63}[first]
    auto.costs.rounds[other + 1, 1] *= 0.99
    auto.refresh(0.0)
    assert auto[1] == first
    auto.costs.rounds[other + 1, 1] *= 0.9
    auto.refresh(0.0)
    assert auto[1] == other


def test_observed_rounds_correct_the_costs() -> None:
    costs = Costs({(8, 16): 10.0, (16, 16): 12.0, (64, 128): 50.0, (1, 1): 4.0})
    for _ in range(200):
        costs.observe(7, 12, 15.0)  # in the graph of 16
    assert costs.round_ms(7, 16) == pytest.approx(15.0, abs=0.2)
    # Unseen shapes near it run on the same machine; far ones tell nothing.
    assert costs.round_ms(15, 16) == pytest.approx(18.0, abs=0.3)
    assert costs.round_ms(63, 128) == 50.0 and costs.round_ms(0, 1) == 4.0
    before = costs.round_ms(7, 16)
    costs.observe(7, 16, 30.0)  # a hiccup
    assert costs.round_ms(7, 16) == pytest.approx(before, rel=0.01)
    before = costs.round_ms(7, 16)
    costs.observe(7, 16, 500.0)  # a pause
    costs.observe(7, 16, 0.1)
    costs.observe(31, 400, 5.0)  # no graph
    assert costs.round_ms(7, 16) == before


def test_a_shape_not_run_does_not_keep_its_last_load() -> None:
    costs = Costs({(32, 32): 14.0, (16, 32): 9.0})
    auto = AutoBudget(costs, max_num_seqs=32)

    def serve(context_ms: float, tokens_31: float, tokens_15: float) -> int:
        accepted = {31: tokens_31 - 1, 15: tokens_15 - 1}
        auto.acceptance.expected = lambda n, chain=False: accepted.get(n, 0.0)  # type: ignore
        budgets = []
        for step in range(3000):
            if step % READ_EVERY == 0:
                auto.refresh(0.0)
            budgets.append(budget := auto[32])
            costs.observe(budget, 32, costs.rounds[budget + 1, 32] + context_ms)
        return max(set(budgets), key=budgets[-1000:].count)  # with a look at the other now and then

    assert serve(20.0, 3.3, 3.0) == 15  # long contexts, modest drafts
    assert serve(20.0, 7.0, 4.0) == 31  # long contexts, good drafts
    assert serve(0.0, 7.0, 4.0) == 31  # short contexts
    assert serve(0.0, 3.3, 3.0) == 15  # modest drafts again: what 15 cost long ago has faded


def test_a_disturbed_measurement_is_bounded_by_larger_rounds() -> None:
    """A busy host makes rounds longer, never shorter."""
    true = {(rows, n): 5.0 + 0.01 * rows * n for rows in (1, 4, 8, 16) for n in (1, 8, 32)}
    disturbed = {**true, (8, 1): 22.0, (1, 32): 9.0}
    found = lowered(disturbed)
    assert found[8, 1] == true[16, 1] and found[1, 32] == true[4, 32]
    assert {shape: ms for shape, ms in found.items() if disturbed[shape] == true[shape]} == {
        shape: ms for shape, ms in true.items() if disturbed[shape] == ms
    }


@pytest.mark.parametrize("measured", [0.57, 2.2, 60.0])
def test_an_absurd_measurement_gives_way_to_a_few_rounds(measured: float) -> None:
    costs = Costs({(16, 4): measured})
    assert costs.hopeful_ms(15, 4) == pytest.approx(0.6 * measured)
    for _ in range(FAR_RUN):
        costs.observe(15, 4, 6.0)
    assert costs.round_ms(15, 4) == pytest.approx(6.0) == costs.hopeful_ms(15, 4)
    for ms in (60.0, 6.1, 0.2, 6.0, 50.0, 5.9):  # single rounds of no account
        costs.observe(15, 4, ms)
    assert costs.round_ms(15, 4) == pytest.approx(6.0, rel=0.03)


def test_a_busy_spell_does_not_change_a_well_known_cost_much() -> None:
    costs = Costs({(16, 4): 6.0})
    for _ in range(100):
        costs.observe(15, 4, 6.0)
    for _ in range(6):
        costs.observe(15, 4, 9.0)
    assert costs.round_ms(15, 4) == pytest.approx(6.0, rel=0.05)
    for _ in range(60):  # the load has changed
        costs.observe(15, 4, 9.0)
    assert costs.round_ms(15, 4) == pytest.approx(9.0, rel=0.15)
    for _ in range(FAR_RUN):
        costs.observe(15, 4, 18.0)
    assert costs.round_ms(15, 4) == pytest.approx(18.0, rel=0.01)


def test_a_chain_where_it_is_faster() -> None:
    costs = machine(knee=160)
    costs.chains = {shape: 0.9 * ms for shape, ms in costs.rounds.items() if shape[0] == 16}
    auto = AutoBudget(costs, max_num_seqs=8, max_depth=15)
    # A sure drafter: a wide tree accepts no more than a chain of its best tokens.
    sure = [1.0] * 16 + [0.0] * 48
    rounds = Rounds(64, sure, sure, chain_share=1.0)
    auto.acceptance.update(rounds.verify(63, 3000), 0.0)
    auto.refresh(0.0)
    assert auto.choice(1) == Choice(15, True) and auto[1] == 15
    assert auto.ranges()[0] == (1, 8, "chain of 15")
    # A drafter whose best token is right half the time: trees, however cheap the chain.
    unsure = [1.0] + [0.5] * 31 + [0.0] * 32
    rounds = Rounds(64, unsure, unsure, chain_share=0.2)
    auto.acceptance = Acceptance(15)
    auto.acceptance.update(rounds.verify(63, 3000), 0.0)
    auto.refresh(0.0)
    assert not any(auto.choice(n)[1] for n in range(1, 9))


def test_no_chain_deeper_than_the_drafter() -> None:
    costs = machine(knee=160)
    costs.chains = dict.fromkeys(costs.rounds, 0.01)
    auto = AutoBudget(costs, max_num_seqs=8, max_depth=9)
    assert {auto.choice(n) for n in range(1, 9)} == {Choice(7, True)}


def test_chains_are_timed_apart() -> None:
    costs = Costs({(16, 4): 6.0, (8, 4): 5.0}, chains={(16, 4): 5.0})
    for _ in range(200):
        costs.observe(15, 4, 8.0, CHAIN)
        costs.observe(7, 4, 5.5, CHAIN)  # no such graph
    chain, tree = costs.round_ms(15, 4, CHAIN), costs.round_ms(15, 4)
    assert chain == pytest.approx(8.0, rel=0.02) and costs.round_ms(7, 4, CHAIN) is None
    assert tree == pytest.approx(6.0 * 8.0 / 5.0, rel=0.02)  # the load is the same


def test_depth_bounds_what_is_expected() -> None:
    auto = AutoBudget(machine(knee=160), max_num_seqs=4, max_depth=1)
    assert max(auto.acceptance.expected(budget) for budget in TIERS) <= 1.0


@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(256, 2048), (1024, 8192), (10, 8192)])
def test_measured_rounds_fit_the_draft(max_num_seqs: int, tokens: int) -> None:
    block_size = 16
    every = [(budget + 1, n) for budget in TIERS for n in (1, 2, 128, 192, 256, max_num_seqs)]
    shapes = measurable(every, tokens // block_size)
    assert all(rows == 1 or n * block_size <= tokens for rows, n in shapes)
    assert {rows for rows, _ in shapes} == {budget + 1 for budget in TIERS}
    assert [rows * n for rows, n in shapes] == sorted(rows * n for rows, n in shapes)


def output(lengths: dict[str, int], drafts: int) -> Any:
    tokens = {name: [-1] * drafts for name in lengths} if drafts else {}
    return SimpleNamespace(num_scheduled_tokens=lengths, scheduled_spec_decode_tokens=tokens)


def test_watch_marks_steps_of_chains() -> None:
    costs = machine(knee=160)
    costs.chains = {(16, n): 0.01 for n in (1, 2, 4, 8)}
    watch = Watch(AutoBudget(costs, max_num_seqs=8, max_depth=15), Executor([]))
    for lengths, chain in (
        ({"a": 16, "b": 16}, True),
        ({"a": 32, "b": 32}, False),  # drafted before the choice changed
        ({"a": 16, "b": 100}, False),
        ({"a": 1}, False),
        ({}, False),
    ):
        step = output(lengths, 15)
        watch.scheduled(step)
        assert asks_for_chains(step) == chain


class Executor:
    """Answers with a meter's counts."""

    def __init__(self, counts: list[list[int]]) -> None:
        self.counts, self.asked = counts, 0

    def collective_rpc(self, method: object, non_block: bool) -> Future[Any]:
        assert method is read_meter and non_block
        self.asked += 1
        answer: Future[Any] = Future()
        answer.set_result([self.counts])
        return answer


def test_watch_times_rounds_and_reads_the_meter() -> None:
    auto = AutoBudget(machine(knee=160), max_num_seqs=8)
    flat = [1.0] * 64
    executor = Executor(Rounds(64, flat, flat).verify(63, 3000))
    watch = Watch(auto, executor)
    measured = auto.costs.round_ms(15, 2)
    assert measured is not None
    before = auto.acceptance.expected(31)
    for step in range(READ_EVERY + READ_AFTER):
        assert auto.acceptance.expected(31) == before
        watch.step(output({"a": 16, "b": 16}, 15), 1.0 + step * 2e-3 * measured)
    assert executor.asked == 1
    assert auto.acceptance.expected(31) > before
    corrected = auto.costs.round_ms(15, 2)
    assert corrected == pytest.approx(2 * measured, rel=0.05)


def test_watch_counts_steady_steps_only() -> None:
    """Around a step with another number of requests outputs come in bunches."""
    auto = AutoBudget(machine(knee=160), max_num_seqs=8)
    watch = Watch(auto, Executor([[0] * 64] * 6))
    measured = auto.costs.round_ms(15, 2)
    assert measured is not None
    now = 1.0
    for _ in range(10):
        for lengths, ms in (("ab", 2.5), ("ab", 0.6), ("ab", 1.2), ("ab", 1.2), ("a", 1.0)):
            now += 1e-3 * ms * measured
            watch.step(output(dict.fromkeys(lengths, 16), 15), now)
    assert auto.costs.round_ms(15, 2) == pytest.approx(1.2 * measured, rel=0.05)
    assert auto.costs._observed.keys() == {((16, 2), False)}


def test_watch_leaves_mixed_steps_and_pauses_out() -> None:
    auto = AutoBudget(machine(knee=160), max_num_seqs=8)
    watch = Watch(auto, Executor([[0] * 64] * 6))
    measured = auto.costs.round_ms(15, 2)
    for step, (lengths, drafts) in enumerate(
        [({"a": 16, "b": 100}, 15), ({"a": 16, "b": 16}, 0), ({}, 0), ({"a": 16, "b": 16}, 15)] * 5
    ):
        watch.step(output(lengths, drafts), 1.0 + 0.02 * step)
    assert auto.costs.round_ms(15, 2) == measured


@pytest.mark.parametrize("chain", [False, True])
def test_a_measured_round_drafts_as_a_served_one(
    monkeypatch: pytest.MonkeyPatch, chain: bool
) -> None:
    """The draft has the width that rounds of as many nodes get."""
    asked: list[dict[str, Any]] = []
    step = SimpleNamespace(verified=False, has_plain_rows=True)
    sampling = SimpleNamespace(
        temperature=SimpleNamespace(gpu=None), seeds=SimpleNamespace(gpu=None)
    )
    runner = SimpleNamespace(
        device="cpu",
        model_state=SimpleNamespace(runtime=SimpleNamespace(step=step)),
        req_states=SimpleNamespace(last_sampled_tokens=None, next_prefill_tokens=None),
        sampler=SimpleNamespace(sampling_states=sampling),
        speculator=SimpleNamespace(propose=lambda **keys: asked.append(keys)),
    )
    state = SimpleNamespace(
        input_batch=SimpleNamespace(num_reqs=2),
        attn_metadata=None,
        slot_mappings_by_layer=None,
        hidden_states=None,
        aux_hidden_states=None,
    )
    monkeypatch.setattr(cost.integration, "dummy_step", lambda *args: (state, torch.zeros(2, 5)))
    cost._round(runner, 1, 2, chain)
    cost._round(runner, 8, 2, chain)
    plain, keys = asked
    # Where nothing is drafted, the drafter's context still follows the text.
    assert plain["num_speculative_tokens"] == 0 and plain["num_rejected"].tolist() == [0, 0]
    assert keys["dummy_run"] and keys["num_speculative_tokens"] == 7
    assert keys["num_rejected"].tolist() == [7, 7] and keys["num_sampled"].tolist() == [1, 1]


def test_attach_passes_outputs_on() -> None:
    seen = []
    step = output({"a": 64}, 63)

    def update(_: object, *given: object) -> str:
        seen.append(given)
        return "outputs"

    class Scheduler:
        dynamic_sd_lookup: Any = (0, 1)
        schedule = patches.schedule(lambda self: step)
        update_from_output = patches.update_from_output(update)

    scheduler = Scheduler()
    core = SimpleNamespace(
        scheduler=scheduler,
        model_executor=Executor([]),
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(
                max_num_seqs=4, max_num_scheduled_tokens=512, max_num_batched_tokens=512
            ),
            speculative_config=SimpleNamespace(max_depth=15, max_num_new_slots_for_drafting=0),
            model_config=SimpleNamespace(is_hybrid=False),
        ),
    )
    observer = attach(core, machine(knee=160))
    assert observer is not None
    observe_steps(scheduler, [observer])
    assert isinstance(scheduler.dynamic_sd_lookup, AutoBudget)
    assert scheduler.schedule() is step and hasattr(step, "ddtree_chains")
    assert scheduler.update_from_output(step, "model output") == "outputs"
    assert seen == [(step, "model output")]


def test_attach_without_graphs_leaves_the_schedule() -> None:
    scheduler = SimpleNamespace(dynamic_sd_lookup=[0, 31])
    spec = SimpleNamespace(num_speculative_tokens_per_batch_size=[(1, 1, 31)])
    config = SimpleNamespace(speculative_config=spec)
    assert attach(SimpleNamespace(scheduler=scheduler, vllm_config=config), Costs()) is None
    assert scheduler.dynamic_sd_lookup == [0, 31]
