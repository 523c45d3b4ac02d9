# SPDX-License-Identifier: Apache-2.0
"""The oracle agrees with transformers, with itself, and with brute force over its trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from . import Drafter, Round, Target, Trace, acceptance_length, greedy

MODELS = Path(__file__).resolve().parents[2] / "models"
NUM_TOKENS = 64
TOP_K = 64
PROMPTS = (
    "import os\nimport sys\n\n\ndef main():\n",
    "class Node:\n    def __init__(self, value, parent=None):\n        self.value = value\n",
    "def read_lines(path, encoding='utf-8'):\n    with open(path, encoding=encoding) as f:\n",
    "def __eq__(self, other):\n    if not isinstance(other, Fraction):\n        return",
)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(MODELS / "nano")


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return Drafter.load(MODELS / "nano-dflash", target)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(MODELS / "nano" / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]


@pytest.fixture(scope="module")
def traces(target: Target, drafter: Drafter, prompts: list[list[int]]) -> list[Trace]:
    """Greedy continuations, known one block beyond NUM_TOKENS."""
    n = NUM_TOKENS + drafter.block_size
    return [Trace(target, drafter, p, greedy(target, p, n)) for p in prompts]


def rounds_of(traces: list[Trace], budget: int, **kwargs) -> list[Round]:
    return [
        r
        for t in traces
        for r in t.replay(budget=budget, top_k=TOP_K, max_tokens=NUM_TOKENS, **kwargs)
    ]


def paths(r: Round) -> set[tuple[int, ...]]:
    """Every root-to-node token path of a round's tree."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(r.tokens[1:], r.parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found)


def test_target_equals_transformers(target: Target, prompts: list[list[int]]) -> None:
    from transformers import Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM.from_pretrained(MODELS / "nano", dtype=torch.float32).eval()
    for prompt in prompts:
        ids = prompt + greedy(target, prompt, 32)
        with torch.inference_mode():
            out = theirs(torch.tensor([ids]), output_hidden_states=True)
        hidden, states, _ = target.forward(ids)
        torch.testing.assert_close(target.logits(hidden), out.logits[0], rtol=1e-4, atol=1e-4)
        # Their last state is normed, so it is our `hidden`; the others enter the layers.
        for ours, his in zip([*states[:-1], hidden], out.hidden_states, strict=True):
            torch.testing.assert_close(ours, his[0], rtol=1e-4, atol=1e-4)
        greedy_ids = out.logits[0].argmax(-1).tolist()
        assert ids[len(prompt) :] == greedy_ids[len(prompt) - 1 : -1]


def test_incremental_passes_equal_one_pass(target: Target, prompts: list[list[int]]) -> None:
    ids = prompts[1]
    whole, _, _ = target.forward(ids)
    first, _, past = target.forward(ids[:5])
    second, _, _ = target.forward(ids[5:], past)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-5, atol=1e-5)


def test_draft_sees_exactly_the_tokens_before_its_anchor(
    target: Target, drafter: Drafter, traces: list[Trace]
) -> None:
    tokens = traces[1].tokens
    position = len(tokens) // 2

    def draft(changed: int | None) -> torch.Tensor:
        ids = list(tokens)
        if changed is not None:
            ids[changed] = (ids[changed] + 17) % 1000
        return Trace(target, drafter, ids[:4], ids[4:]).draft(position, None, None)

    plain = draft(None)
    assert plain.shape[0] == drafter.block_size - 1
    torch.testing.assert_close(draft(position + 1), plain, rtol=1e-5, atol=1e-5)
    for seen in (0, position - 1, position):
        assert (draft(seen) - plain).abs().max() > 1e-2, seen


def test_masks_use_the_shipped_embedding(target: Target, drafter: Drafter) -> None:
    saved = torch.load(MODELS / "nano-dflash" / "mask_embedding.pt", weights_only=True)
    mask_row = drafter.embed_tokens[drafter.mask_token_id]
    torch.testing.assert_close(mask_row, saved["embedding"].reshape(-1).float(), rtol=0, atol=0)
    other = torch.arange(len(target.embed_tokens)) != drafter.mask_token_id
    assert torch.equal(drafter.embed_tokens[other], target.embed_tokens[other])


@pytest.mark.parametrize("budget", [1, 5, 7, 8, 31])
def test_accepted_is_the_longest_path_that_spells_the_output(
    traces: list[Trace], budget: int
) -> None:
    for trace in traces:
        rounds = trace.replay(budget=budget, top_k=TOP_K, max_tokens=NUM_TOKENS)
        for r in rounds:
            known = trace.tokens[r.position + 1 :]
            spelled = [p for p in paths(r) if list(p) == known[: len(p)]]
            assert r.accepted == max(len(p) for p in spelled)
            assert r.num_nodes == budget and r.tokens[0] == trace.tokens[r.position]


def test_chain_is_the_drafters_best_token_at_each_depth(
    drafter: Drafter, traces: list[Trace]
) -> None:
    depth = drafter.block_size - 1
    for trace in traces:
        for r in trace.replay(budget=31, top_k=TOP_K, chain=True, max_tokens=NUM_TOKENS):
            best = trace.draft(r.position, None, None).argmax(-1).tolist()
            assert list(r.tokens[1:]) == best
            assert r.parents == tuple(range(-1, depth))
    assert rounds_of(traces, depth, chain=True) == [
        r
        for t in traces
        for r in t.replay(budget=depth, top_k=1, max_tokens=NUM_TOKENS)  # a tree without siblings
    ]


@pytest.mark.parametrize("depth", [1, 3])
def test_depth_limit(traces: list[Trace], depth: int) -> None:
    rounds = rounds_of(traces, 15, depth=depth)
    assert max(len(p) for r in rounds for p in paths(r)) == depth
    assert max(r.accepted for r in rounds) == depth


@pytest.mark.parametrize("max_tokens", [1, 2, 9, NUM_TOKENS])
def test_rounds_end_with_the_output(traces: list[Trace], max_tokens: int) -> None:
    for trace in traces:
        long = trace.replay(budget=15, top_k=TOP_K)
        rounds = trace.replay(budget=15, top_k=TOP_K, max_tokens=max_tokens)
        assert 1 + sum(r.emitted for r in rounds) == max_tokens
        # The limit decides when to stop and what is kept, never what was accepted.
        assert [r.accepted for r in rounds] == [r.accepted for r in long[: len(rounds)]]
        assert all(r.emitted == r.accepted + 1 for r in rounds[:-1])
        assert all(r.complete for r in rounds)


def test_the_end_of_the_known_continuation_is_told(
    target: Target, drafter: Drafter, traces: list[Trace]
) -> None:
    trace = traces[0]
    n = trace.num_prompt_tokens
    full = trace.replay(budget=31, top_k=TOP_K, max_tokens=NUM_TOKENS)
    r = max(full, key=lambda r: r.accepted)
    assert r.accepted >= 3
    # The output is known up to this round's first accepted token only.
    output = trace.tokens[n : r.position + 2]
    cut = Trace(target, drafter, trace.tokens[:n], output).replay(budget=31, top_k=TOP_K)[-1]
    assert (cut.position, cut.accepted, cut.emitted) == (r.position, 1, 1)
    assert not cut.complete and r.complete
    with pytest.raises(ValueError, match="only 2 output tokens"):
        Trace(target, drafter, trace.tokens[:n], output[:2]).replay(budget=7, top_k=8, max_tokens=3)


def test_stop_token_ends_the_request(traces: list[Trace]) -> None:
    trace = traces[0]
    output = trace.tokens[trace.num_prompt_tokens :]
    stop = output[20]
    rounds = trace.replay(budget=15, top_k=TOP_K, stop_token_ids=[stop])
    assert 1 + sum(r.emitted for r in rounds) == output.index(stop) + 1
    free = trace.replay(budget=15, top_k=TOP_K)
    assert [r.accepted for r in rounds] == [r.accepted for r in free[: len(rounds)]]


def test_trees_shrink_at_the_length_limit(traces: list[Trace]) -> None:
    trace = traces[0]
    limit = trace.num_prompt_tokens + 40
    rounds = trace.replay(budget=15, top_k=TOP_K, max_model_len=limit)
    assert 1 + sum(r.emitted for r in rounds) == 40
    assert [r.num_nodes for r in rounds] == [min(15, limit - 2 - r.position) for r in rounds]
    assert any(0 < r.num_nodes < 15 for r in rounds)


def test_trees_accept_more_than_the_chain(drafter: Drafter, traces: list[Trace]) -> None:
    chain = acceptance_length(rounds_of(traces, drafter.block_size - 1, chain=True))
    trees = [acceptance_length(rounds_of(traces, b)) for b in (15, 31, 63)]
    assert 1.3 < chain < 4  # an untrained or miswired drafter stays near 1
    assert chain < trees[0] < trees[1] < trees[2]
