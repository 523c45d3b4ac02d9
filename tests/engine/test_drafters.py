# SPDX-License-Identifier: Apache-2.0
"""Drafters as checkpoints have them draft right: with a vocabulary of their own, with a sliding
window, in the format of the speculators library."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.config.checkpoints import as_speculators
from tests.conftest import NANO
from tests.engine import models
from tests.engine.harness import PROMPTS, Result, ddtree, greedy, open_engine, run_engine

LENGTHS = [14, 12, 10]
ENGINE: dict[str, Any] = {"max_num_seqs": 3, "block_size": 32, "max_model_len": 256}
NEVER = 5
"""A special token, which nobody ever writes: nano's drafter loses nothing without it."""


def run(drafter: Path | None) -> Result:
    """Prompts up to 101 tokens."""
    spec = ddtree(NANO._replace(drafter=drafter), 12) if drafter else None
    params = [greedy(n, temperature=0.8 * (i == 1), seed=4) for i, n in enumerate(LENGTHS)]
    more = {**ENGINE, "per_request_spec_decode_metrics": "detailed" if spec else "none"}
    return run_engine(NANO.target, spec, [PROMPTS[5], PROMPTS[0], PROMPTS[3]], params, **more)


def rounds(result: Result) -> list[list[int]]:
    return [list(o.outputs[0].spec_decode_metrics.per_step_accepted) for o in result.outputs]


def changed(folder: Path, dflash: dict[str, Any], **config: Any) -> Path:
    """Nano's drafter with changes in its config.json."""
    drafter = folder / "drafter"
    shutil.copytree(NANO.drafter, drafter)
    old = json.loads((NANO.drafter / "config.json").read_text())
    new = {**old, **config, "dflash_config": {**old["dflash_config"], **dflash}}
    (drafter / "config.json").write_text(json.dumps(new))
    return drafter


def with_own_vocabulary(drafter: Path) -> Path:
    """The drafter with the target's vocabulary but one token, so that ids are not the target's."""
    path = drafter / "config.json"
    config = json.loads(path.read_text())
    size = config["vocab_size"] - 1
    path.write_text(json.dumps({**config, "draft_vocab_size": size, "tie_word_embeddings": False}))
    head = load_file(NANO.target / "model.safetensors")["model.embed_tokens.weight"]
    weights = load_file(drafter / "model.safetensors")
    kept = torch.cat([torch.arange(NEVER), torch.arange(NEVER + 1, size + 1)])
    weights |= {"lm_head.weight": head[kept].contiguous(), "d2t": kept - torch.arange(size)}
    save_file(weights, drafter / "model.safetensors")
    return drafter


@pytest.fixture(scope="module")
def plain() -> Result:
    return run(None)


@pytest.fixture(scope="module")
def usual() -> Result:
    return run(NANO.drafter)


def test_a_vocabulary_of_its_own_and_a_wide_window(
    plain: Result, usual: Result, tmp_path: Path
) -> None:
    """The window holds every context, the missing token is never written: the same rounds."""
    drafter = changed(tmp_path, {"use_swa": True, "swa_window_size": 200})
    result = run(with_own_vocabulary(drafter))
    assert result.token_ids == plain.token_ids
    assert rounds(result) == rounds(usual) and result.counters.num_accepted_tokens > 5


def test_a_narrow_window(plain: Result, usual: Result, tmp_path: Path) -> None:
    """In one layer of two: two KV groups. Drafts are others, and still often right."""
    result = run(
        changed(
            tmp_path,
            {"causal": False},
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=20,
            use_sliding_window=True,
        )
    )
    assert result.token_ids == plain.token_ids
    assert rounds(result) != rounds(usual)
    assert result.counters.num_accepted_tokens > usual.counters.num_accepted_tokens // 2


def test_the_format_of_the_speculators_library(
    plain: Result, usual: Result, tmp_path: Path
) -> None:
    """The same rounds as the plain format's."""
    result = run(as_speculators(NANO.drafter, tmp_path / "drafter", NANO.target))
    assert result.token_ids == plain.token_ids
    assert rounds(result) == rounds(usual) and result.counters == usual.counters


def test_speculators_with_a_smaller_vocabulary(
    plain: Result, usual: Result, tmp_path: Path
) -> None:
    """As its checkpoints have it: a head and both maps, and the target's embeddings again."""
    drafter = with_own_vocabulary(changed(tmp_path, {}))
    weights = load_file(drafter / "model.safetensors")
    embeddings = load_file(NANO.target / "model.safetensors")["model.embed_tokens.weight"]
    kept = weights["d2t"] + torch.arange(len(weights["d2t"]))
    known = torch.zeros(len(embeddings), dtype=torch.bool)
    known[kept] = True
    save_file(
        {**weights, "t2d": known, "embed_tokens.weight": embeddings.contiguous()},
        drafter / "model.safetensors",
    )
    result = run(as_speculators(drafter, tmp_path / "speculators", NANO.target))
    assert result.token_ids == plain.token_ids
    assert rounds(result) == rounds(usual) and result.counters == usual.counters


def test_fewer_positions_than_the_target(usual: Result, tmp_path: Path) -> None:
    """A prompt is longer than the drafter's table of rotary angles would be: the same rounds."""
    result = run(changed(tmp_path, {}, max_position_embeddings=64))
    assert rounds(result) == rounds(usual) and result.counters == usual.counters


@pytest.mark.parametrize("own_tokens", [False, True])
def test_a_drafter_of_another_size(own_tokens: bool, tmp_path: Path) -> None:
    """With embeddings and a head of its own it drafts; without, no request has to find it out."""
    from transformers import AutoConfig

    drafter = tmp_path / "drafter"
    config = AutoConfig.from_pretrained(NANO.target)
    models.random_drafter(drafter, config, hidden_size=64, own_tokens=own_tokens)
    spec = ddtree(NANO._replace(drafter=drafter), 12)
    if own_tokens:
        result = run_engine(NANO.target, spec, PROMPTS[:2], greedy(8), **ENGINE)
        expected = run_engine(NANO.target, None, PROMPTS[:2], greedy(8), **ENGINE)
        assert result.token_ids == expected.token_ids
        assert result.counters.num_draft_tokens > 0
        return
    start = open_engine(NANO.target, spec, **ENGINE)
    with pytest.raises(ValueError, match="no embed_tokens of its own"), start:
        pass
