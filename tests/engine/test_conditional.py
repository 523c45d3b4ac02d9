# SPDX-License-Identifier: Apache-2.0
"""Conditional drafters in the engine: the target's own tokens, and the oracle's rounds.

The drafters have a trained backbone and a random head, so conditions change the trees, and drafts
are still often right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import conditional
from tests.conftest import NANO, Pair
from tests.engine.harness import PROMPTS, Result, ddtree, greedy, run_engine, watch_reaches
from tests.oracle import Round, Target
from tests.oracle.conditional import ConditionalDrafter, DFlash2, DSpark, LatticeTrace, LiLiCorr
from vllm_ddtree.proposer.speculator import DDTreeSpeculator

# KV blocks end inside drafts and trees; the third request ends at the length limit, in mid-tree.
MAX_MODEL_LEN = 136
ENGINE: dict[str, Any] = {
    "block_size": 32,
    "max_num_batched_tokens": 1024,
    "max_model_len": MAX_MODEL_LEN,
}
REQUESTS: list[tuple[str, int, dict[str, Any]]] = [
    (PROMPTS[0], 22, {}),
    (PROMPTS[3], 20, {"temperature": 0.8, "seed": 5}),
    (PROMPTS[5], 99, {}),
    # Penalties depend on the tokens before a row: the chain alone is verified.
    (PROMPTS[2], 20, {"presence_penalty": 0.5}),
]
CHAIN = [False, False, False, True]


@dataclass(frozen=True, eq=False)
class Kind:
    """A family of drafters, and what drafts like it offline."""

    make: Callable[..., Pair]
    oracle: type[ConditionalDrafter]
    still: dict[str, Any] | None = None
    """Sizes with which its conditions do nothing, so that it is the plain drafter; None: none."""


def with_keys(make: Callable[..., Pair], **keys: Any) -> Callable[..., Pair]:
    return functools.partial(make, **keys)


def anchored(folder: Path) -> Pair:
    """Its anchor drafts the first token, which its Markov head knows."""
    known = plain()
    texts = [
        [*output.prompt_token_ids, *tokens]
        for output, tokens in zip(known.outputs, known.token_ids, strict=True)
    ]
    return conditional.dspark(folder, from_anchor=True, confidence=False, follow=texts)


STILL = {"size": 0.0, "conv": 0.0}
DSPARK = conditional.dspark
KINDS = {
    "dflash2": Kind(conditional.dflash2, DFlash2, STILL),
    "dflash2-capped": Kind(
        with_keys(conditional.dflash2, output_multiplier=0.7, final_logit_softcapping=9.0), DFlash2
    ),
    "dspark": Kind(DSPARK, DSpark, STILL),
    "dspark-confidence": Kind(with_keys(DSPARK, confidence=True), DSpark),
    "dspark-anchor": Kind(anchored, DSpark),
    "dspark-vocabulary": Kind(with_keys(DSPARK, vocabulary=2000), DSpark),
    "lilicorr": Kind(conditional.lilicorr, LiLiCorr),
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def drafter(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return kind.make(tmp_path_factory.mktemp("conditional"))


def serve(spec: dict[str, Any] | None, extra: int = 0, **more: Any) -> Result:
    """The requests through an engine; `extra` tokens beyond their ends."""
    lengths = [min(n, MAX_MODEL_LEN - 101) + extra for _, n, _ in REQUESTS]
    params = [greedy(n, **keys) for n, (_, _, keys) in zip(lengths, REQUESTS, strict=True)]
    detail = "detailed" if spec else "none"
    keys = {**ENGINE, "per_request_spec_decode_metrics": detail, **more}
    return run_engine(NANO.target, spec, [prompt for prompt, _, _ in REQUESTS], params, **keys)


@functools.cache
def plain() -> Result:
    """Without speculation, known beyond the requests' ends by a block."""
    return serve(None, extra=NANO.block_size, max_model_len=MAX_MODEL_LEN + NANO.block_size)


@functools.cache
def traces(kind: Kind, pair: Pair) -> list[LatticeTrace]:
    target = Target.load(pair.target)
    offline = kind.oracle.load(pair.drafter, target)
    known = plain()
    return [
        LatticeTrace(target, offline, output.prompt_token_ids, tokens)
        for output, tokens in zip(known.outputs, known.token_ids, strict=True)
    ]


def oracle(kind: Kind, pair: Pair, budget: int, depth: int | None) -> list[list[Round]]:
    """Each request's rounds that had a tree."""
    result = []
    for trace, (_, max_tokens, _), chain in zip(traces(kind, pair), REQUESTS, CHAIN, strict=True):
        rounds = trace.replay(
            budget=budget,
            top_k=trace.drafter.top_k,
            depth=depth,
            chain=chain,
            max_tokens=min(max_tokens, MAX_MODEL_LEN - trace.num_prompt_tokens),
            max_model_len=MAX_MODEL_LEN,
        )
        result.append([r for r in rounds if r.num_nodes])
    return result


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[list[int]]]]:
    """The trees' tokens of every draft from now on, dummy ones left out."""
    found: list[list[list[int]]] = []
    propose = DDTreeSpeculator.propose

    def proposed(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tokens = propose(self, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            found.append(tokens.tolist())
        return tokens

    monkeypatch.setattr(DDTreeSpeculator, "propose", proposed)
    yield found


def check_tokens(result: Result) -> None:
    """They are the target's own."""
    for tokens, known in zip(result.token_ids, plain().token_ids, strict=True):
        assert tokens == known[: len(tokens)]
    assert [len(t) for t in result.token_ids] == [22, 20, 35, 20]


@pytest.mark.parametrize(("budget", "depth"), [(1, None), (5, 3), (15, None), (31, None)])
def test_the_oracles_rounds(kind: Kind, drafter: Pair, budget: int, depth: int | None) -> None:
    keys = {"top_k": 4} if depth is None else {"top_k": 4, "num_speculative_tokens": depth}
    result = serve(ddtree(drafter, budget, **keys))
    check_tokens(result)
    expected = oracle(kind, drafter, budget, depth)
    for output, rounds in zip(result.outputs, expected, strict=True):
        metrics = output.outputs[0].spec_decode_metrics
        assert metrics.per_step_accepted == [r.accepted for r in rounds]
        assert metrics.per_step_drafted == [r.num_nodes for r in rounds]
    if budget >= 5:
        assert result.counters.num_accepted_tokens > 5


def test_the_oracles_trees(kind: Kind, drafter: Pair, drafts: list[list[list[int]]]) -> None:
    """Every tree of a request, token by token: few of its nodes are ever accepted."""
    prompt, max_tokens, _ = REQUESTS[0]
    keys: dict[str, Any] = {**ENGINE, "per_request_spec_decode_metrics": "detailed"}
    run_engine(NANO.target, ddtree(drafter, 15, top_k=4), [prompt], greedy(max_tokens), **keys)
    rounds = traces(kind, drafter)[0].replay(
        budget=15, top_k=4, max_tokens=max_tokens, max_model_len=MAX_MODEL_LEN
    )
    assert len(rounds) > 5
    assert [draft[0] for draft in drafts[: len(rounds)]] == [list(r.tokens[1:]) for r in rounds]


def test_without_its_conditions_it_is_a_plain_drafter(
    kind: Kind, tmp_path: Path, drafts: list[list[list[int]]]
) -> None:
    """The very trees of plain DFlash, where scores are constant and where they are ignored."""
    if kind.still is None:
        pytest.skip("its conditions cannot be taken away")
    made = []
    for name, sizes, keys in (
        ("still", kind.still, {}),
        ("ignored", {**kind.still, "size": 1.0}, {"conditional": False}),
        ("used", {**kind.still, "size": 1.0}, {}),
    ):
        (tmp_path / name).mkdir()
        pair = kind.make(tmp_path / name, **sizes)
        drafts.clear()
        serve(ddtree(pair, 15, top_k=4, **keys))
        made.append(list(drafts))
    drafts.clear()
    serve(ddtree(NANO, 15, top_k=4))
    assert len(drafts) > 10
    assert made[0] == drafts
    assert (made[1] == drafts) is (kind.make is conditional.dflash2)
    assert made[2] not in (made[0], made[1])


def test_one_reach(drafter: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few nodes: the head takes the whole block."""
    reaches = watch_reaches(monkeypatch)
    schedule = [[1, 1, 15], [2, 2, 3], [3, 8, 0]]
    spec = {"method": "ddtree", "model": str(drafter.drafter), "budget_per_batch_size": schedule}
    check_tokens(serve(spec))
    assert {reach.nodes for reach in reaches} == {0, 3, 15}
    assert len({reach.positions for reach in reaches}) == 1


def test_checked_and_automatic(drafter: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of every step find nothing."""
    monkeypatch.setenv("VLLM_DDTREE_CHECK", "1")
    # Prompts come in chunks beside decodes.
    result = serve({"method": "ddtree", "model": str(drafter.drafter)}, max_num_batched_tokens=96)
    check_tokens(result)
    assert result.counters.num_accepted_tokens > 5
