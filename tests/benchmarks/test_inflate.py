# SPDX-License-Identifier: Apache-2.0
"""Inflation keeps the function: the wide pair has the small pair's tokens and drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from benchmarks.inflate import SHAPES, Shape, Widener, inflate

from ..conftest import Pair
from ..oracle import Drafter, Target, greedy

PROMPTS = (
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item",
)
NUM_TOKENS = 32
# 6 copies (4 carriers, one pair of twins), zero dimensions, the constant one, a wider group.
TINY = replace(SHAPES["tiny"], vocab=2600)
# 4 copies and nothing left over, no added tokens or states.
EVEN = Shape(5, 512, 8, 4, 400, 3, 3, 2048)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "even"])
def wide_pair(request: pytest.FixtureRequest, nano_pair: Pair, tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("wide")
    shape = EVEN if request.param == "even" else TINY
    dtype = torch.float32 if request.param == "float32" else torch.bfloat16
    inflate(nano_pair.target, nano_pair.drafter, folder, shape, dtype)
    yield folder


@pytest.fixture(scope="module")
def prompts(nano_pair: Pair) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(nano_pair.target / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]


def is_bfloat16(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text())
    return config["torch_dtype"] == "bfloat16"


def test_same_tokens_and_drafts(wide_pair: Path, nano_pair: Pair, prompts: list[list[int]]) -> None:
    small = Target.load(nano_pair.target)
    small_drafter = Drafter.load(nano_pair.drafter, small)
    wide = Target.load(wide_pair / "target")
    drafter = Drafter.load(wide_pair / "drafter", wide)
    vocab = small.lm_head.shape[0]
    rounded = wide.embed_tokens.shape[1] == TINY.hidden and is_bfloat16(wide_pair / "target")
    tolerance = 5e-2 if rounded else 1e-4  # bfloat16 rounds weights of norms unless rho is 1
    for prompt in prompts:
        output = greedy(small, prompt, NUM_TOKENS)
        assert greedy(wide, prompt, NUM_TOKENS) == output
        ids = prompt + output
        (hidden, states, _), (wide_hidden, wide_states, _) = small.forward(ids), wide.forward(ids)
        want, got = small.logits(hidden), wide.logits(wide_hidden)
        assert (got[:, :vocab] - want).abs().max() < tolerance
        assert vocab == got.shape[1] or got[:, vocab:].max() < -30
        context, wide_context = small_drafter.context(states), drafter.context(wide_states)
        for position in range(len(prompt), len(ids), 5):
            want = small_drafter.draft(context, ids[position], position)
            got = drafter.draft(wide_context, ids[position], position)
            assert got.argmax(-1).tolist() == want.argmax(-1).tolist()
            log_probs = got.log_softmax(-1)[:, :vocab]
            assert (log_probs - want.log_softmax(-1)).abs().max() < tolerance


def test_added_layers_change_nothing_and_are_not_zero(wide_pair: Path, prompts) -> None:
    wide = Target.load(wide_pair / "target")
    _, states, _ = wide.forward(prompts[0])
    torch.testing.assert_close(states[-1], states[4], rtol=0, atol=1e-5)  # nano has 4 layers
    for layer in wide.layers[4:]:
        for weight in (layer.q_proj, layer.o_proj, layer.gate_proj, layer.down_proj):
            assert (weight == 0).float().mean() < 0.01


def test_added_states_are_read(wide_pair: Path, nano_pair: Pair) -> None:
    config = json.loads((wide_pair / "drafter" / "config.json").read_text())
    ids = config["dflash_config"]["target_layer_ids"]
    assert ids[:3] == [0, 1, 2] and sorted(set(ids)) == ids
    assert max(ids) < config["num_target_layers"] - 1
    weights: dict[str, torch.Tensor] = {}
    for file in (wide_pair / "drafter").glob("*.safetensors"):
        weights |= load_file(file)
    assert weights["fc.weight"].shape == (config["hidden_size"], len(ids) * config["hidden_size"])


def test_carriers_round_to_the_mean() -> None:
    widener = Widener(24, 250, True, torch.bfloat16, "cpu")
    assert (widener.copies, widener.carriers) == (10, 8)
    weight = 1 + torch.rand(24)
    mean = widener.norm(weight)[widener.index[: widener.carriers]].double().mean(0)
    error = (mean / (weight.double() * widener.rho**0.5) - 1).abs().max()
    assert error < 2**-8 / 8
    assert widener.index.flatten().sort().values.tolist() == list(range(240))


def test_a_smaller_shape_is_refused(nano_pair: Pair, tmp_path: Path) -> None:
    for change in ({"hidden": 64}, {"layers": 3}, {"heads": 1, "kv_heads": 1}, {"vocab": 100}):
        with pytest.raises(ValueError):
            inflate(nano_pair.target, nano_pair.drafter, tmp_path, replace(TINY, **change))
    assert not list(tmp_path.iterdir())
