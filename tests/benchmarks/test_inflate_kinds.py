# SPDX-License-Identifier: Apache-2.0
"""Inflation keeps the function: hybrid targets, targets with experts, conditional drafters.

The reference for targets is transformers, for drafters benchmarks.training's plain networks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.inflate import Shape, inflate
from benchmarks.training.assemble import assemble
from benchmarks.training.common import save_checkpoint
from benchmarks.training.conditional import Heads
from benchmarks.training.heads import LiLiCorr, Markov, Selector
from benchmarks.training.hybrid import config_of, student_of
from benchmarks.training.nets import (
    Drafter,
    load_drafter,
    load_target,
    read_config,
    read_weights,
    sizes_of,
)

from ..conftest import Pair

STATES = [0, 1, 2]
# 6 copies of 128, the constant dimension, added heads, units, layers, states and tokens.
HYBRID = Shape(
    8, 832, 8, 2, 512, 3, 4, 2560, 0, 0, linear_key_heads=2, linear_value_heads=4, draft_ffn=512
)
EXPERTS = Shape(6, 832, 8, 2, 256, 3, 4, 2560, 8, 4, draft_ffn=512)
DENSE = Shape(6, 832, 8, 2, 512, 3, 4, 2560)


def save_nano(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], pair: Pair) -> Path:
    save_checkpoint(folder, {**config, "torch_dtype": "float32"}, weights, pair.target)
    return folder


@pytest.fixture(scope="module")
def hybrid_target(nano_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid that begins as nano does, its recurrent layers random."""
    torch.manual_seed(0)
    teacher = load_target(nano_pair.target, STATES, "cpu")
    student = student_of(teacher, "nano").cpu()
    weights = {name: weight.detach() for name, weight in student.state_dict().items()}
    folder = tmp_path_factory.mktemp("hybrid") / "target"
    return save_nano(folder, config_of(student.sizes), weights, nano_pair)


@torch.no_grad()
def logits_and_states(folder: Path, ids: Tensor, states: list[int]) -> tuple[Tensor, Tensor]:
    """What transformers makes of a checkpoint: logits and the drafter's features."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    outputs: dict[int, Tensor] = {}
    for number, layer in enumerate(model.model.layers):

        def keep(_: Any, inputs: Any, output: Any, number: int = number) -> None:
            outputs[number] = output[0] if isinstance(output, tuple) else output

        layer.register_forward_hook(keep)
    logits = model(ids).logits
    return logits, torch.cat([outputs[i] for i in states], -1)


def drafted(folder: Path, features: Tensor, target: Path, ids: Tensor, block: int) -> Tensor:
    """Hidden states of a draft at three positions."""
    config = read_config(folder)
    drafter = load_wide_drafter(folder, config)
    embedding = read_weights(target)["model.embed_tokens.weight"].float()
    anchors = torch.tensor([[12, 25, 39]])
    embeds = F.embedding(ids.gather(1, anchors), embedding)
    with torch.no_grad():
        return drafter(features, embeds, anchors, block)


def load_wide_drafter(folder: Path, config: dict[str, Any]) -> Drafter:
    if "candidate" not in str(read_weights(folder).keys()) and "lilicorr" not in str(config):
        return load_drafter(folder, "cpu")
    drafter = Drafter(sizes_of(config), len(config["dflash_config"]["target_layer_ids"]))
    weights = {n: w for n, w in read_weights(folder).items() if n in drafter.state_dict()}
    mask = torch.load(folder / "mask_embedding.pt", weights_only=True)["embedding"]
    drafter.load_state_dict({**weights, "mask_embedding": mask.float()})
    return drafter


def head_of(folder: Path) -> Tensor:
    weights = read_weights(folder)
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).float()


@pytest.mark.parametrize("kind", ["hybrid", "experts"])
def test_same_logits_and_drafts(
    kind: str, nano_pair: Pair, hybrid_target: Path, tmp_path: Path
) -> None:
    shape = HYBRID if kind == "hybrid" else EXPERTS
    target = hybrid_target if kind == "hybrid" else nano_pair.target
    inflate(target, nano_pair.drafter, tmp_path, shape, torch.float32)
    torch.manual_seed(1)
    ids = torch.randint(0, 2048, (1, 48))
    want, features = logits_and_states(target, ids, STATES)
    config = read_config(tmp_path / "drafter")
    states = config["dflash_config"]["target_layer_ids"]
    assert states[:3] == STATES and len(states) == 4 and states[3] >= 4
    got, wide_features = logits_and_states(tmp_path / "target", ids, states)
    assert (got[..., :2048] - want).abs().max() < 1e-3
    assert (got[..., :2048].log_softmax(-1) - want.log_softmax(-1)).abs().max() < 1e-3
    assert got[..., 2048:].max() < -30
    block = nano_pair.block_size
    want = drafted(nano_pair.drafter, features, target, ids, block) @ head_of(target).T
    wide = drafted(tmp_path / "drafter", wide_features, tmp_path / "target", ids, block)
    got = (wide @ head_of(tmp_path / "target").T)[..., :2048]
    assert (got.log_softmax(-1) - want.log_softmax(-1)).abs().max() < 2e-3


def test_added_recurrent_layers_add_nothing_and_are_not_zero(
    nano_pair: Pair, hybrid_target: Path, tmp_path: Path
) -> None:
    inflate(hybrid_target, nano_pair.drafter, tmp_path, HYBRID, torch.float32)
    config = read_config(tmp_path / "target")
    assert config["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2
    ids = torch.randint(0, 2048, (1, 48))
    _, states = logits_and_states(tmp_path / "target", ids, [3, 4, 5, 6, 7])
    before, *after = states.chunk(5, -1)
    for state in after:
        torch.testing.assert_close(state, before, rtol=0, atol=1e-4)
    weights = read_weights(tmp_path / "target")
    for name, weight in weights.items():
        if name.startswith("model.layers.5.") and "norm" not in name:
            assert (weight == 0).float().mean() < 0.01, name


def test_experts_are_chosen_by_what_is_read(nano_pair: Pair, tmp_path: Path) -> None:
    """The FFN of 384 units is cut in two: pairs of experts share a row of the router."""
    inflate(nano_pair.target, nano_pair.drafter, tmp_path, EXPERTS, torch.float32)
    weights = read_weights(tmp_path / "target")
    router = weights["model.layers.0.mlp.gate.weight"]
    assert router.shape == (8, 832) and torch.equal(router[0::2], router[1::2])
    assert not torch.equal(router[0], router[2])
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["norm_topk_prob"]


def random_heads(pair: Pair, folder: Path) -> Path:
    torch.manual_seed(2)
    heads = Heads(load_drafter(pair.drafter, "cpu"), pair.block_size, 16)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            if name.endswith(("successor_codebook", "markov_w2.weight", "proj.weight")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    file = folder / "heads.safetensors"
    save_file({n: w.float().contiguous() for n, w in heads.checkpoint().items()}, file)
    return file


@pytest.mark.parametrize("kind", ["dflash2", "lilicorr", "dspark"])
def test_conditional_heads_score_the_same(kind: str, nano_pair: Pair, tmp_path: Path) -> None:
    torch.manual_seed(3)
    narrow = tmp_path / kind
    assemble(kind, nano_pair.drafter, random_heads(nano_pair, tmp_path), narrow, nano_pair.target)
    if kind == "dflash2":  # convolutions that do something
        weights = read_weights(narrow)
        for name, weight in weights.items():
            if "_conv." in name:
                weights[name] = weight + 0.1 * torch.randn(weight.shape)
        save_file(weights, narrow / "model.safetensors")
    wide = tmp_path / "wide"
    inflate(nano_pair.target, narrow, wide, DENSE, torch.float32)
    hidden = torch.randn(2, 7, 128)
    ids = torch.randint(0, 2048, (2, 7, 16))
    values = torch.randn(2, 7, 16).log_softmax(-1)
    anchors = torch.randint(0, 2048, (2,))
    context = torch.randn(2, 128)

    def scores(folder: Path, target: Path, hidden: Tensor, context: Tensor) -> Tensor:
        config, weights = read_config(folder), read_weights(folder)

        def take(prefix: str) -> dict[str, Tensor]:
            found = {n: w.float() for n, w in weights.items() if n.startswith(prefix)}
            return {n.removeprefix(prefix): w for n, w in found.items()}

        size, vocab = config["hidden_size"], config["vocab_size"]
        head: Any
        with torch.no_grad():
            if kind == "dflash2":
                head = Selector(size, vocab, 16)
                head.load_state_dict(take("candidate_selector."))
                return head(hidden, ids, values, anchors)
            if kind == "lilicorr":
                head = LiLiCorr(size, 8, 1e-6, config["dflash_config"])
                head.load_state_dict(take("lilicorr."))
                embedding = read_weights(target)["model.embed_tokens.weight"].float()
                return head(F.embedding(ids, embedding), values, hidden, context)
            head = Markov(size, vocab, 16)
            head.load_state_dict(take("markov_head.") | take("confidence_head."))
            sure = head.confidence(hidden, ids[..., 0])
            return torch.cat([head(ids, values, anchors).flatten(), sure.flatten()])

    want = scores(narrow, nano_pair.target, hidden, context)
    from benchmarks.widener import Widener

    widener = Widener(128, 832, True, torch.float32, "cpu")

    def widened(x: Tensor) -> Tensor:
        flat = widener.writes(x.reshape(-1, 128).T).T.reshape(*x.shape[:-1], 832)
        flat[..., -1] = 0.3  # whatever the constant dimension holds
        return flat

    got = scores(wide / "drafter", wide / "target", widened(hidden), widened(context))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    if kind == "dflash2":
        check_convolutions_of(narrow, wide / "drafter", widened)


def check_convolutions_of(narrow: Path, wide: Path, widened: Any) -> None:
    """vLLM's own convolution gives copies of the narrow result."""
    import ddtree_testbed

    ddtree_testbed.prepare()
    from vllm.model_executor.models.qwen3_dflash2 import _grouped_conv

    torch.manual_seed(4)
    x, y = torch.randn(16, 128), torch.randn(16, 128)

    def convolve(folder: Path, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        config, weights = read_config(folder)["dflash_config"], read_weights(folder)
        taps, size = config["conv_kernel_size"], config["conv_group_size"]
        prefix = "layers.1.mlp_conv."
        base = weights[f"{prefix}base_kernel"].float()
        groups = x.shape[1] // size
        delta = x @ weights[f"{prefix}kernel_projection.weight"].float().T
        delta = delta.view(-1, 2, taps, groups)
        first, second = (
            _grouped_conv(rows, delta[:, side], base[side], 8, groups, size, taps)
            for side, rows in enumerate((x, y))
        )
        return first, second

    wide_x, wide_y = widened(x), widened(y)
    wide_x[:, -1] = wide_y[:, -1] = 0  # as the norms leave it
    for got, want in zip(convolve(wide, wide_x, wide_y), convolve(narrow, x, y), strict=True):
        expected = widened(want)
        expected[:, -1] = 0
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_shapes_that_do_not_fit_are_refused(
    nano_pair: Pair, hybrid_target: Path, tmp_path: Path
) -> None:
    from dataclasses import replace

    wrong = [
        (hybrid_target, DENSE),
        (nano_pair.target, HYBRID),
        (hybrid_target, replace(HYBRID, linear_value_heads=2)),
        (nano_pair.target, replace(EXPERTS, experts_per_token=3)),
        (nano_pair.target, replace(EXPERTS, ffn=1)),
    ]
    for target, shape in wrong:
        with pytest.raises(ValueError):
            inflate(target, nano_pair.drafter, tmp_path, shape)
    assert not list(tmp_path.iterdir())
