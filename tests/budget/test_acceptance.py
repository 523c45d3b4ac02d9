# SPDX-License-Identifier: Apache-2.0
"""The accepted nodes that are expected of a budget are those of a drafter whose rounds are
known."""

import math
import random

import pytest

from vllm_ddtree.budget.acceptance import LEAST, PRIOR_ROUNDS, WINDOW, Acceptance, few, prior, tail
from vllm_ddtree.round.meter import ONE, Reading


class Rounds:
    """A meter's counts under a drafter whose row i is claimed with `claim`, right with `truth`.

    The chain's row i is claimed and right with `chain_share` times that.
    """

    def __init__(
        self, size: int, claim: list[float], truth: list[float], chain_share: float = 0.5
    ) -> None:
        self.size, self.claim, self.truth, self.chain_share = size, claim, truth, chain_share
        self.counts: Reading = [[0] * size for _ in range(6)]
        self.random = random.Random(0)

    def verify(self, budget: int, rounds: int, chain: bool = False, every: int = 1) -> Reading:
        """Rounds of a budget; of the drafts one in `every` is of the widest width."""
        verified, share = (3, self.chain_share) if chain else (0, 1.0)
        for i in range(rounds):
            for row in range(self.size):
                claims = int(self.claim[row] * ONE), int(self.claim[row] * self.chain_share * ONE)
                if row == 0:
                    claims = ONE, ONE
                if i % every == 0:
                    self.counts[0][row] += claims[0]
                    self.counts[3][row] += claims[1]
                if row <= budget:
                    self.counts[verified + 1][row] += claims[chain]
                    if row == 0 or self.random.random() < share * self.truth[row]:
                        self.counts[verified + 2][row] += 1
        return [list(row) for row in self.counts]


def test_prior() -> None:
    assert prior(0) == 0.0 and prior(3) == 1.5
    values = [prior(n) for n in range(256)]
    assert values == sorted(values)
    fresh = Acceptance()
    assert [fresh.expected(n) for n in (0, 15, 63)] == [0.0, prior(15), prior(63)]
    assert fresh.expected(1) <= 1.0


@pytest.mark.parametrize("budget", [7, 31])
def test_right_claims_serve_every_budget(budget: int) -> None:
    chances = [1.0] + [0.9 / (row + 1) for row in range(1, 64)]
    rounds = Rounds(64, chances, chances)
    acceptance = Acceptance()
    acceptance.update(rounds.verify(budget, 3000), 1.0)
    for n in (1, 3, 7, 15, 31, 63):  # verified and unverified rows alike
        assert acceptance.expected(n) == pytest.approx(sum(chances[1 : n + 1]), rel=0.08)


def test_wrong_claims_are_corrected() -> None:
    claim = [1.0] + [0.5] * 63
    truth = [1.0] + [0.25] * 7 + [0.05] * 56
    rounds = Rounds(64, claim, truth)
    acceptance = Acceptance()
    acceptance.update(rounds.verify(7, 3000), 1.0)
    assert acceptance.expected(7) == pytest.approx(7 * 0.25, rel=0.08)
    # Beyond what was verified the last correction holds.
    assert acceptance.expected(15) == pytest.approx(15 * 0.25, rel=0.1)
    acceptance.update(rounds.verify(63, 3000), 1.0)
    assert acceptance.expected(15) == pytest.approx(7 * 0.25 + 8 * 0.05, rel=0.1)


def test_chains() -> None:
    fresh = Acceptance()
    assert 0.0 < fresh.expected(15, chain=True) < fresh.expected(15)
    claim = [1.0] + [0.6] * 63
    truth = [1.0] + [0.3] * 63
    rounds = Rounds(64, claim, truth, chain_share=0.5)
    acceptance = Acceptance()
    acceptance.update(rounds.verify(63, 3000), 1.0)
    # Never verified: the chain's claims, as wrong as the trees' were.
    assert acceptance.expected(7, chain=True) == pytest.approx(7 * 0.15, rel=0.08)
    # Chains are a quarter of what they claim.
    rounds.truth = [1.0] + [0.15] * 63
    acceptance.update(rounds.verify(7, 6000, chain=True), 1.0)
    assert acceptance.expected(7, chain=True) == pytest.approx(7 * 0.3 * 0.25, rel=0.08)
    assert acceptance.expected(7) == pytest.approx(7 * 0.3, rel=0.08)
    # They are all right, and more: not better than trees of as many nodes.
    rounds.truth = [1.0] * 64
    rounds.chain_share = 1.0
    acceptance.update(rounds.verify(7, 20_000, chain=True), 1.0)
    assert acceptance.expected(7, chain=True) <= acceptance.expected(7)


def test_hard_places_verified_as_chains_do_not_count_against_them() -> None:
    """Chains run where requests come and go; what they claimed there is what they are held to."""
    acceptance = Acceptance()
    easy = Rounds(64, [1.0] + [0.6] * 63, [1.0] + [0.6] * 63, chain_share=1.0)
    acceptance.update(easy.verify(63, 3000), 1.0)
    before = acceptance.expected(7, chain=True)
    easy.claim = easy.truth = [1.0] + [0.1] * 63
    acceptance.update(easy.verify(7, 300, chain=True), 1.0)
    assert acceptance.expected(7, chain=True) > 0.85 * before


def test_old_rounds_fade() -> None:
    """Whatever the number of rounds: by the clock."""
    for rounds in (20, 80):
        texts = Rounds(8, [1.0] + [0.5] * 7, [1.0] + [0.55] * 7)
        acceptance = Acceptance()
        now = 1.0
        for truth in (0.55, 0.45):
            texts.truth = [1.0] + [truth] * 7
            for _ in range(60):
                now += WINDOW / 20
                acceptance.update(texts.verify(7, rounds), now)
            assert acceptance.expected(7) == pytest.approx(7 * truth, rel=0.08)


def test_texts_that_turn_leave_nothing_behind() -> None:
    good = Rounds(8, [1.0] * 8, [1.0] * 8)
    acceptance = Acceptance()
    acceptance.update(good.verify(7, 4000), 1.0)
    assert acceptance.expected(7) > 6.5 and acceptance.turns == 0
    good.truth = [1.0] + [0.0] * 7
    acceptance.update(good.verify(7, 100), 1.1)
    assert acceptance.expected(7) < 0.6 and acceptance.turns == 1
    # The drafter claims less, and is right as often as it claims: found by the first rows.
    good.truth = good.claim = [1.0] + [0.9] * 7
    acceptance.update(good.verify(7, 4000), 2.0)
    good.truth = good.claim = [1.0] + [0.3] * 7
    acceptance.update(good.verify(7, 200), 2.1)
    assert acceptance.expected(7) == pytest.approx(2.1, rel=0.15)


def test_how_likely_so_few_and_so_many_are() -> None:
    assert tail(50, 100, 0.5) == few(5.0, 5.0) == 1.0
    for bound, exact in (
        (tail(9, 10, 0.5), sum(math.comb(10, k) for k in (9, 10)) / 2**10),
        (tail(0, 10, 0.2), 0.8**10),
        (few(0.0, 7.0), math.exp(-7)),
        (few(3.0, 0.1), 0.1**3 / 6),
    ):
        assert 0.999 * exact <= bound < 20 * exact
    assert tail(10, 10, 0.999) <= 1.0 and tail(10_000, 10_000, 0.001) == 0.0


def test_what_was_seen_stays_while_nothing_is_drafted() -> None:
    useless = Rounds(8, [1.0] + [0.5] * 7, [1.0] + [0.0] * 7)
    acceptance = Acceptance()
    acceptance.update(useless.verify(7, 4000), 1.0)
    before = acceptance.expected(7)
    acceptance.update(useless.verify(7, 0), 1000.0)
    assert acceptance.expected(7) == before < 0.1
    # A single round now and then does not bring the prior back, either.
    for second in range(1001, 1201):
        acceptance.update(useless.verify(7, 1), float(second))
    assert acceptance.expected(7) < 0.2
    # Texts that have become easy show within so many rounds as are kept.
    useless.truth = useless.claim = [1.0] * 8
    for second in range(1201, 1201 + LEAST):
        acceptance.update(useless.verify(7, 1), float(second))
    assert acceptance.expected(7) > 3.0


@pytest.mark.parametrize("chain", [False, True])
def test_few_of_the_drafts_are_wide(chain: bool) -> None:
    """Larger budgets are known from these, and the window is as long as if all were."""
    estimates = []
    for every in (1, 16):
        rounds = Rounds(64, [1.0] + [0.6] * 63, [1.0] + [0.6] * 63)
        acceptance = Acceptance()
        acceptance.update(rounds.verify(7, 6000, chain, every), 1.0)
        assert acceptance.expected(63) == pytest.approx(63 * 0.6, rel=0.05)
        rounds.claim = rounds.truth = [1.0] + [0.1] * 63
        acceptance.update(rounds.verify(7, 6000, chain, every), 1.0)
        estimates.append([acceptance.expected(n, chain) for n in (3, 7)])
        estimates[-1].append(acceptance.expected(63))
    assert estimates[1] == pytest.approx(estimates[0], rel=0.05)


def test_few_rounds_decide_little() -> None:
    acceptance = Acceptance()
    rounds = Rounds(64, [1.0] + [0.9] * 63, [1.0] + [0.0] * 63)
    acceptance.update(rounds.verify(31, PRIOR_ROUNDS // 2), 1.0)
    assert acceptance.expected(31) > 0.5 * prior(31)


def test_never_above_the_budget() -> None:
    # Modest claims about the rows verified, too high ones about the rest: corrected above 1.
    rounds = Rounds(64, [1.0] + [0.5] * 7 + [1.0] * 56, [1.0] * 64)
    acceptance = Acceptance()
    acceptance.update(rounds.verify(7, 100_000), 1.0)
    assert acceptance.expected(63) == 63.0 and acceptance.expected(0) == 0.0
