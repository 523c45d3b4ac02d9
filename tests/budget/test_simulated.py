# SPDX-License-Identifier: Apache-2.0
"""What `auto` loses against the best budget that never changes, in a simulated engine.

Loads are steady, then change: texts turn, requests come and go, the measurement at start is wrong.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from tests.budget.simulated import (
    EASY,
    HARD,
    MIXED_TEXT,
    PLAIN,
    RANDOM,
    Part,
    Simulation,
    Text,
    steady,
)

TEXTS = {"easy": EASY, "mixed": MIXED_TEXT, "hard": HARD, "random": RANDOM}
LOADS = (1, 2, 8, 32, 64, 128, 256)


@cache
def served(name: str, requests: int) -> Simulation:
    return steady(requests, TEXTS[name], seconds=10.0)


@pytest.mark.parametrize(("name", "requests"), itertools.product(TEXTS, LOADS))
def test_a_steady_load_loses_next_to_nothing(name: str, requests: int) -> None:
    sim = served(name, requests)
    (part,) = sim.parts
    assert sim.regret(2.0, 10.0, part) < 0.02
    assert sim.tokens_s(2.0, 10.0) > 0.98 * sim.static(part, PLAIN)
    # From the first moment on, when nothing is known of the texts.
    assert sim.regret(0.0, 2.0, part) < 0.08
    # What is found is kept: near-ties do not switch to and fro.
    assert sum(at > 2.0 for at, _ in sim.best) <= 4


@pytest.mark.parametrize("requests", [128, 256])
def test_beyond_a_hundred_requests_nothing_is_drafted(requests: int) -> None:
    for name in ("mixed", "hard", "random"):
        assert served(name, requests).shares(2.0, 10.0)[0] > 0.97


def half_is_gone(sim: Simulation, start: float, part: Part) -> float:
    """Seconds after `start` until a quarter second has half the regret that keeping on would have.

    Keeping on: with what was chosen just before.
    """
    before = sim.shares(start - 1.0, start)
    nodes = max(before, key=lambda n: before[n])
    stays = next(c for _, c, _ in sim.log if c.nodes == nodes)
    whole = 1 - sim.static(part, stays) / sim.best_static(part)[1]
    for quarter in range(16):
        at = start + quarter / 4
        if sim.regret(at, at + 0.25, part) < max(whole / 2, 0.03):
            return quarter / 4
    return float("inf")


@pytest.mark.parametrize("requests", [1, 8, 32, 64])
@pytest.mark.parametrize(("before", "after"), itertools.permutations(TEXTS, 2))
def test_traffic_that_turns(requests: int, before: str, after: str) -> None:
    parts = [Part(4.0, requests, TEXTS[before]), Part(4.0, requests, TEXTS[after])]
    sim = Simulation(parts).run()
    assert half_is_gone(sim, 4.0, parts[1]) <= 2.0
    # Of one request the two seconds show so few rounds that luck is 4 %.
    assert sim.regret(6.0, 8.0, parts[1]) < (0.08 if requests == 1 else 0.04)


def test_requests_that_come_and_go() -> None:
    parts = [Part(3.0, n, MIXED_TEXT) for n in (1, 32, 256, 64, 8, 128, 1)]
    sim = Simulation(parts).run()
    for place, part in enumerate(parts):
        assert sim.regret(3.0 * place + 0.5, 3.0 * place + 3.0, part) < 0.03


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("nodes", [3, 7, 15, 63])
def test_a_measurement_that_is_too_short_is_corrected(requests: int, nodes: int) -> None:
    sim = steady(
        requests,
        MIXED_TEXT,
        seconds=12.0,
        measured=lambda n, m, ms: 0.1 * ms if (n, m) == (nodes, requests) else ms,
        longer=False,
    )
    assert sim.regret(2.0, 12.0, sim.parts[0]) < 0.03


@pytest.mark.parametrize("requests", [1, 8])
def test_a_busy_spell_while_rounds_are_measured(requests: int) -> None:
    """All that was measured in it is too long, so a few nodes look best. Tries tell."""
    sim = steady(
        requests,
        MIXED_TEXT,
        seconds=40.0,
        measured=lambda n, m, ms: 2.5 * ms if n >= 7 and m == requests else ms,
        longer=False,
    )
    assert sim.regret(0.0, 1.0, sim.parts[0]) > 0.15
    assert sim.regret(35.0, 40.0, sim.parts[0]) < 0.03


@pytest.mark.parametrize("requests", [16, 32, 64])
def test_a_drafter_that_bears_few_masks_gets_few(requests: int) -> None:
    usual = steady(requests, MIXED_TEXT, seconds=10.0)
    sim = steady(requests, MIXED_TEXT, seconds=10.0, narrow=0.97)
    few = [choice.narrow for at, choice, _ in sim.log if at > 4.0]
    assert sum(few) > 0.85 * len(few)  # one draft in 16 has all masks
    assert sim.tokens_s(4.0, 10.0) > 1.02 * usual.tokens_s(4.0, 10.0)
    assert "few masks" in sim.auto.words()


@pytest.mark.parametrize("requests", [1, 8, 32, 64])
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_a_drafter_that_collapses_is_left_alone(requests: int, share: float) -> None:
    sim = steady(requests, MIXED_TEXT, seconds=20.0, narrow=share)
    few = [choice.narrow for at, choice, _ in sim.log if at > 4.0]
    assert sum(few) < 0.01 * len(few)
    assert sim.regret(4.0, 20.0, sim.parts[0]) < 0.02
    if requests >= 32:  # where it could pay, it was tried
        assert any(choice.narrow for _, choice, _ in sim.log)


def test_rounds_that_become_dearer_are_noticed() -> None:
    """Long contexts: plain decoding grows less than rounds of many rows."""
    sim = steady(32, MIXED_TEXT, seconds=8.0, scale=lambda nodes, n: 2.5 if nodes > 3 else 1.0)
    assert sim.best_static(sim.parts[0])[0].nodes == 3
    assert sim.regret(3.0, 8.0, sim.parts[0]) < 0.02


def test_the_simulation_is_the_same_every_time() -> None:
    parts = [Part(1.0, 8, EASY), Part(1.0, 32, RANDOM)]
    first, second = Simulation(parts).run(), Simulation(parts).run()
    assert first.log == second.log and first.log != Simulation(parts, seed=1).run().log


def test_words() -> None:
    words = served("mixed", 32).auto.words()
    assert words.startswith("32 requests: trees of 7, 3.") and "plain decoding 0.4" in words
    assert served("random", 32).auto.words().startswith("32 requests: plain decoding, 1.00 tokens")


def test_texts_of_the_simulation() -> None:
    """The mixed text is the measured one; a chain never beats the tree of as many nodes."""
    assert MIXED_TEXT.tokens(7) == pytest.approx(3.69) and MIXED_TEXT.tokens(31) == pytest.approx(
        4.64
    )
    for text in (*TEXTS.values(), Text.of(power=0.8)):
        assert text.tokens(7, chain=True) <= text.tokens(7) + 0.05
