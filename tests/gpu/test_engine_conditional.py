# SPDX-License-Identifier: Apache-2.0
"""Conditional drafters on a GPU, whole drafts and verify steps in CUDA graphs.

Their backbone is the trained one of the `small` pair, their heads are random.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import conditional
from tests.conftest import Pair
from tests.engine.harness import PROMPTS
from tests.gpu.engines import ENGINE, GRAPHS, check_gaps, gaps, serve, spec
from vllm_ddtree.testing.engine import generate, open_engine, run_engine

Maker = Callable[..., Pair]
KINDS: dict[str, Maker] = {
    "dflash2": functools.partial(conditional.dflash2, top_k=16, size=0.5),
    "lilicorr": functools.partial(conditional.lilicorr, top_k=16),
    "dspark": functools.partial(conditional.dspark, size=0.5),
    "dspark-confidence": functools.partial(conditional.dspark, size=0.5, confidence=True),
    "dspark-anchor": functools.partial(conditional.dspark, from_anchor=True),
}
"""The last one knows the pairs of tokens of the target's own texts: its backbone drafts one place
late."""
LENGTH = 120
EQUAL = 0.95
"""Least share of equal draft tokens: rounding in bfloat16 decides near-ties otherwise."""


@functools.cache
def texts(pair: Pair) -> list[list[int]]:
    """Prompts and the target's own greedy continuations."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    result = run_engine(pair.target, None, PROMPTS, params, **{**ENGINE, "enforce_eager": True})
    outputs = zip(result.outputs, result.token_ids, strict=True)
    return [[*(output.prompt_token_ids or ()), *tokens] for output, tokens in outputs]


@pytest.fixture(params=list(KINDS))
def drafting_pair(request: pytest.FixtureRequest, tmp_path: Path, small_pair: Pair) -> Pair:
    keys = {"follow": texts(small_pair)} if request.param == "dspark-anchor" else {}
    return KINDS[request.param](tmp_path, small_pair, **keys)._replace(name=request.param)


@pytest.mark.parametrize("keys", [{}, {"conditional": False}], ids=["conditional", "unary"])
def test_texts_are_the_targets(drafting_pair: Pair, small_pair: Pair, keys: dict[str, Any]) -> None:
    run = serve(drafting_pair, {**spec(drafting_pair, 31), **keys}, **GRAPHS)
    print(drafting_pair.name, keys, run.result.counters.acceptance_length, dict(run.drafts))
    assert 0 < run.result.counters.num_accepted_tokens < run.result.counters.num_draft_tokens
    assert run.replays and sum(run.drafts.values()) > 20
    assert run.compiled == []
    check_gaps(gaps(small_pair, run.judged))


def test_the_automatic_budget(drafting_pair: Pair, small_pair: Pair) -> None:
    run = serve(drafting_pair, spec(drafting_pair, "auto"), **GRAPHS)
    assert run.result.counters.num_accepted_tokens > 0
    assert run.compiled == []
    check_gaps(gaps(small_pair, run.judged))


def drafts_by_position(pair: Pair, speculation: dict[str, Any]) -> dict[tuple[int, int], list[int]]:
    """(request, anchor's position) -> the chain that is drafted after it, of greedy requests."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    found: dict[tuple[int, int], list[int]] = {}
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        propose = DFlashSpeculator.propose

        def proposed(self: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = propose(self, *args, **kwargs)
            if not kwargs.get("dummy_run"):
                place = int(self.input_buffers.positions[0])
                if hasattr(self, "runtime"):
                    drafts = self.runtime.trees.chains[self.tree_indices[:1]]
                found[len(asked), place] = drafts[0].tolist()
            return drafts

        patch.setattr(DFlashSpeculator, "propose", proposed)
        with open_engine(pair.target, speculation, **{**ENGINE, **GRAPHS}) as llm:
            params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
            for prompt in PROMPTS:
                asked.append(prompt)
                generate(llm, [prompt], params)
    return found


def test_chains_are_vllms_own(drafting_pair: Pair) -> None:
    """Where both methods drafted after the same token, they drafted the same."""
    method = "dspark" if drafting_pair.name.startswith("dspark") else "dflash"
    depth = (
        drafting_pair.block_size
        if drafting_pair.name == "dspark-anchor"
        else drafting_pair.block_size - 1
    )
    chain = {"method": method, "model": str(drafting_pair.drafter), "num_speculative_tokens": depth}
    theirs = drafts_by_position(drafting_pair, chain)
    ours = drafts_by_position(drafting_pair, spec(drafting_pair, 31))
    both = sorted(theirs.keys() & ours.keys())
    assert len(both) >= 10
    # The pairs of tokens that this one knows are seldom among the candidates of later positions.
    compared = 1 if drafting_pair.name == "dspark-anchor" else depth
    equal = [
        a == b for p in both for a, b in zip(theirs[p][:compared], ours[p][:compared], strict=True)
    ]
    print(drafting_pair.name, len(both), sum(equal) / len(equal))
    assert sum(equal) >= EQUAL * len(equal)


def test_the_anchor_in_a_graph(
    tmp_path: Path, small_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LiLiCorr's anchor is the last accepted row, by the layout that the context has."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
    from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator

    pair = KINDS["lilicorr"](tmp_path, small_pair)
    propose = DFlashSpeculator.propose
    compared = []

    def proposed(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(self, batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            num_reqs, num_rejected = batch.num_reqs, args[5]
            published = self.anchor_hidden[:num_reqs].clone()
            LiLiCorrSpeculator.prepare_context_anchor(
                self, num_reqs, batch.query_start_loc[: num_reqs + 1], num_rejected
            )
            torch.testing.assert_close(published, self.anchor_hidden[:num_reqs], rtol=0, atol=0)
            assert bool(self.anchor_valid[:num_reqs].all())
            compared.append(num_reqs)
        return drafts

    monkeypatch.setattr(DFlashSpeculator, "propose", proposed)
    run = serve(pair, spec(pair, 31), **GRAPHS)
    assert len(compared) > 20 and max(compared) > 1
    assert sum(run.drafts.values()) > 20
