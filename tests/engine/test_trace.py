# SPDX-License-Identifier: Apache-2.0
"""The rounds that an engine writes down are those that it ran: trees, chains and rounds without a
draft; the trees are the reference's, grown from the oracle's candidates."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import NANO
from tests.engine.harness import PROMPTS, ddtree, greedy, run_engine
from tests.oracle import Drafter, Target, Trace
from tests.oracle.replay import candidates
from vllm_ddtree.trace.read import Request, read_trace
from vllm_ddtree.tree.reference import build_tree

BUDGET, LENGTH = 9, 20


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Request], list[list[int]]]:
    """Rounds and texts of three requests; the last verifies its chain alone."""
    path = tmp_path_factory.mktemp("trace") / "rounds.jsonl"
    params = [greedy(LENGTH), greedy(LENGTH), greedy(LENGTH)]
    params[2].presence_penalty = 0.1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DDTREE_ROUNDS", str(path))
        result = run_engine(NANO.target, ddtree(NANO, BUDGET), PROMPTS[:3], params, max_num_seqs=4)
    trace = read_trace(path)
    assert trace.engine["budget"] == BUDGET and trace.engine["target"] == str(NANO.target)
    requests = sorted(trace.requests, key=lambda request: int(request.name.partition("-")[0]))
    return requests, result.token_ids


def test_texts_and_paths(traced: tuple[list[Request], list[list[int]]]) -> None:
    requests, texts = traced
    assert len(requests) == len(texts) == 3
    forms = set()
    for request, text in zip(requests, texts, strict=True):
        assert request.token_ids()[:LENGTH] == text
        root = text[0]
        for each in request.rounds:
            forms.add(each.form)
            assert each.tokens[0] == each.root == root and each.path[0] == 0
            assert [each.tokens[row] for row in each.path[1:]] == list(each.emitted[:-1])
            assert [each.parents[row] for row in each.path[1:]] == list(each.path[:-1])
            assert each.chain[0] == each.tokens[each.children(0)[0]]
            root = each.emitted[-1]
    assert forms == {"tree", "chain"}
    assert all(each.form == "chain" for each in requests[2].rounds)
    assert {each.reason for each in requests[2].rounds} == {"sampling parameters"}


def test_trees_are_the_references(traced: tuple[list[Request], list[list[int]]]) -> None:
    requests, _ = traced
    target = Target.load(NANO.target)
    drafter = Drafter.load(NANO.drafter, target)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(NANO.target / "tokenizer.json"))
    prompt = PROMPTS[0]
    ids = list(prompt) if not isinstance(prompt, str) else tokenizer.encode(prompt).ids
    replay = Trace(target, drafter, ids, requests[0].token_ids())
    place = len(ids)
    for each in requests[0].rounds[:3]:
        log_probs, token_ids = candidates(replay.draft(place, None, None), 16)
        tree = build_tree(log_probs.numpy(), token_ids.numpy(), BUDGET)
        assert list(each.parents) == tree.parents.tolist()
        assert list(each.tokens[1:]) == tree.tokens[1:].tolist()
        assert each.ranks() == tree.ranks.tolist() and each.depths() == tree.depths.tolist()
        np.testing.assert_allclose(each.probabilities, np.exp(tree.scores), atol=1e-4)
        place += len(each.emitted)
