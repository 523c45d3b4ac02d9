# SPDX-License-Identifier: Apache-2.0
"""The training scripts: networks as vLLM's and transformers', acceptance as the oracles', files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.training import pack
from benchmarks.training.hybrid import config_of, student_of
from benchmarks.training.measure import candidates, lattice_of
from benchmarks.training.nets import (
    Sizes,
    Target,
    delta_rule,
    load_drafter,
    load_target,
    normalised,
    sizes_of,
    unit_lower_inverse,
)
from benchmarks.training.oracle import acceptance, chain_length, true_path
from vllm_ddtree.tree.lattice_reference import build_lattice_tree, lattice_chain

from ..conftest import Pair
from ..oracle import Drafter, Trace, acceptance_length, greedy
from ..oracle import Target as OracleTarget
from ..oracle.lattice import conditional

HYBRID = Sizes(
    vocab=300,
    hidden=64,
    layers=4,
    heads=2,
    kv_heads=1,
    head_dim=32,
    ffn=96,
    rotary_dim=8,
    linear_key_heads=2,
    linear_value_heads=4,
    linear_key_dim=16,
    linear_value_dim=24,
)


def test_a_hybrid_is_what_transformers_makes_of_it() -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    target = Target(HYBRID, [0, 2])
    for name, parameter in target.named_parameters():
        if "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    reference = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config_of(HYBRID))).float().eval()
    missing = reference.load_state_dict(target.state_dict(), strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
    ids = torch.randint(0, 300, (3, 150))
    with torch.no_grad():
        torch.testing.assert_close(
            target.logits(target(ids)[0]), reference(ids).logits, rtol=1e-4, atol=1e-5
        )
        written = target.generate(ids[:, :70], 40, torch.zeros(3))
        again = target.logits(target(written)[0])
    assert torch.equal(again[:, 69:-1].argmax(-1), written[:, 70:])
    assert sizes_of(config_of(HYBRID)) == HYBRID


def test_the_delta_rule_in_chunks_is_the_recurrence() -> None:
    torch.manual_seed(1)
    shape = (2, 150, 3)
    q, k = (normalised(torch.rand(*shape, 16, dtype=torch.float64)) for _ in "qk")
    v, beta = (torch.rand(*size, dtype=torch.float64) for size in ((*shape, 8), shape))
    decay = -0.3 * torch.rand(*shape, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, decay, beta)]
    out, last = delta_rule(*inputs)
    state = torch.zeros(2, 3, 16, 8, dtype=torch.float64)
    wanted = []
    for t in range(shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        known = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - known))[:, :, None]
        wanted.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    want = torch.stack(wanted, 1)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(last, state)
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), inputs)
    expected = torch.autograd.grad((want * weight).sum(), inputs)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_inverse_of_a_triangle(size: int) -> None:
    torch.manual_seed(2)
    lower = torch.rand(3, size, size, dtype=torch.float64).tril(-1) / 4
    eye = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(unit_lower_inverse(lower) @ (eye + lower), eye.expand(3, -1, -1))


def test_a_student_begins_as_its_teacher(nano_pair: Pair) -> None:
    """Its attention layer turns a quarter of its dimensions, so only FFNs and norms are equal."""
    teacher = load_target(nano_pair.target, [0, 1, 2], "cpu")
    student = student_of(teacher, "nano").cpu()
    x = torch.randn(1, 20, 128)
    new: Any
    old: Any
    new, old = student.get_submodule("model.layers.3"), teacher.get_submodule("model.layers.3")
    with torch.no_grad():
        torch.testing.assert_close(new.input_layernorm(x), old.input_layernorm(x))
        first = new.self_attn.queries(x, torch.zeros(1, 20))[0]
        second = old.self_attn.queries(x, torch.zeros(1, 20))[0]
        assert torch.allclose(first.sort(-1).values, second.sort(-1).values, atol=1e-4)


def random_lattice(seed: int, depth: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, 3, (depth, top_k, top_k)).astype(np.float32)
    unary = np.log(rng.dirichlet(np.ones(top_k + 1), depth)[:, :top_k]).astype(np.float32)
    log_probs = conditional(scores, unary).astype(np.float32)
    ours = lattice_of(torch.tensor(scores), torch.tensor(unary)).numpy()
    np.testing.assert_allclose(ours, log_probs, rtol=1e-4, atol=1e-5)
    ids = np.stack([rng.permutation(50)[:top_k] for _ in range(depth)])
    return log_probs, ids


@pytest.mark.parametrize("seed", range(5))
def test_acceptance_is_that_of_the_reference_tree(seed: int) -> None:
    lattice = random_lattice(seed, 6, 4)
    tree = build_lattice_tree(*lattice, budget=40)
    chain, _ = lattice_chain(*lattice)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        row = int(rng.integers(1, 41))
        path = []
        while row:
            path.append(row)
            row = int(tree.parents[row])
        rows = path[::-1]
        text = np.append(tree.tokens[rows], [99] * 6)  # 99 is no candidate
        assert true_path(lattice, text, 40) == rows
        assert true_path(lattice, text, rows[0]) == rows[:1]
    assert chain_length(lattice, chain) == 6
    assert chain_length(lattice, np.append(chain[:3], [99] * 3)) == 3


def test_rounds_of_a_trained_pair_are_the_oracles(nano_pair: Pair) -> None:
    target = load_target(nano_pair.target, [0, 1, 2], "cpu")
    drafter = load_drafter(nano_pair.drafter, "cpu")
    oracle = OracleTarget.load(nano_pair.target)
    block, prompt, length = nano_pair.block_size, [5, 9, 17, 300, 41], 60
    text = prompt + greedy(oracle, prompt, length)
    ids = torch.tensor([text])

    def lattice_at(_: int, at: int) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            features = target(ids)[1]
            anchor = torch.tensor([[at]])
            embeds = F.embedding(ids[:, at : at + 1], target.embedding)
            hidden = drafter(features, embeds, anchor, block)[0, 0, 1:]
            own, values = candidates(target.embedding, hidden)
        table = np.broadcast_to(values.numpy()[:, None], (block - 1, 16, 16))
        return table, own.numpy()

    got = acceptance(np.array([text]), len(prompt) + 1, lattice_at, block - 1, (7,))
    trace = Trace(oracle, Drafter.load(nano_pair.drafter, oracle), prompt, text[len(prompt) :])
    last = len(text) - block
    for name, chain in (("7", False), ("chain", True)):
        rounds = trace.replay(budget=7, top_k=1 if chain else 7, chain=chain, max_tokens=length)
        same = [r for r in rounds if r.position < last]
        assert got[name] == round(acceptance_length(same), 3)


def test_packed_files_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PART", 40_000)
    work = tmp_path / "work"
    (work / "one").mkdir(parents=True)
    files = {"one/model.safetensors": os.urandom(60_001), "one/config.json": b"{}" * 200}
    files["late.pt"] = os.urandom(90_000)
    for name, data in files.items():
        (work / name).write_bytes(data)
    pack.pack(work, tmp_path / "parts", ["one", "late.pt", "absent"], 3)
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) <= 3 and all(part.stat().st_size <= 40_000 for part in parts)
    pack.unpack(tmp_path / "parts", tmp_path / "back")
    for name, data in files.items():
        back = tmp_path / "back" / name
        assert back.exists() == (name != "late.pt")
        assert not back.exists() or back.read_bytes() == data
