# SPDX-License-Identifier: Apache-2.0
"""The choice of budget: expected tokens over measured milliseconds."""

from types import SimpleNamespace

from vllm_ddtree.budget.auto import REFRESH, TIERS, Acceptance, AutoBudget, attach
from vllm_ddtree.budget.cost import Costs


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
    assert set(auto.budgets[1:]) == {7}


def test_useless_drafts_stop() -> None:
    # Plain decoding costs 5 ms, a round at least 6: a drafter that is never right does not pay.
    costs = machine(knee=160)
    costs.rounds |= {(1, n): 5.0 for n in (1, 2, 4, 8, 16, 32, 64, 128)}
    auto = AutoBudget(costs, max_num_seqs=128)
    assert auto[1] > 0
    for _ in range(20 * REFRESH):
        auto.observe(auto[1] or TIERS[0], 0)
    assert auto[1] == 0 and auto[128] == 0


def test_good_drafts_raise_the_budget() -> None:
    auto = AutoBudget(machine(knee=160), max_num_seqs=128)
    before = auto[16]
    for _ in range(20 * REFRESH):
        auto.observe(15, 12)
        auto.observe(7, 4)
    assert auto[16] >= before
    assert auto.acceptance.expected(15) > 11


def test_expected_is_never_above_the_budget() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance.observe(63, 30)
    assert acceptance.expected(3) == 3.0
    assert acceptance.expected(0) == 0.0


def test_small_differences_do_not_switch() -> None:
    costs = Costs({(64, 1): 6.05, (32, 1): 6.0})
    auto = AutoBudget(costs, max_num_seqs=1)
    first = auto[1]
    for _ in range(5 * REFRESH):
        auto.observe(first, 3)
    # The other tier's guess moves with the same observations: no reason to leave.
    assert auto[1] == first


def test_attach_counts_and_passes_on() -> None:
    seen = []

    def count(*args: object, **kwargs: object) -> str:
        seen.append((args, kwargs))
        return "stats"

    scheduler = SimpleNamespace(make_spec_decoding_stats=count, dynamic_sd_lookup=[0, 1])
    core = SimpleNamespace(
        scheduler=scheduler,
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4)),
    )
    attach(core, machine(knee=160))
    auto = scheduler.dynamic_sd_lookup
    result = scheduler.make_spec_decoding_stats(
        None, num_draft_tokens=31, num_accepted_tokens=5, request_id="a"
    )
    assert result == "stats"
    assert seen == [((None, 31), {"num_accepted_tokens": 5, "request_id": "a"})]
    assert auto.acceptance.mean[31] == 5.0


def test_attach_without_graphs_leaves_the_schedule() -> None:
    scheduler = SimpleNamespace(make_spec_decoding_stats=None, dynamic_sd_lookup=[0, 31])
    spec = SimpleNamespace(num_speculative_tokens_per_batch_size=[(1, 1, 31)])
    config = SimpleNamespace(speculative_config=spec)
    attach(SimpleNamespace(scheduler=scheduler, vllm_config=config), Costs())
    assert scheduler.dynamic_sd_lookup == [0, 31]
