# SPDX-License-Identifier: Apache-2.0
"""With quantised caches and weights of the target the text is that of plain decoding with the
same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import NANO, Pair
from tests.engine import models
from tests.engine.harness import PROMPTS, ddtree, generate, greedy, open_engine, run_engine
from tests.engine.known import model_runner

ENGINE: dict[str, Any] = {"block_size": 32, "max_num_seqs": 4}


def requests() -> tuple[list[str], list[Any]]:
    params = [
        greedy(16),
        greedy(14, temperature=1.0, seed=1),
        greedy(15, temperature=0.6, seed=2, top_k=20),
    ]
    return [PROMPTS[5], PROMPTS[1], PROMPTS[3]], params


def store_rounded_rows(patch: pytest.MonkeyPatch) -> None:
    """Plain decoding's keys and values become numbers of fp8 (e4m3)."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    store = CPUAttentionBackendImpl.do_kv_cache_update

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)

    def update(self: Any, layer: Any, key: Any, value: Any, *args: Any) -> None:
        store(self, layer, rounded(key), rounded(value), *args)

    patch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", update)


def allow_any_processor(patch: pytest.MonkeyPatch) -> None:
    """vLLM's metadata builder plans kernels that trees do not use: for a float32 cache."""
    from vllm.v1.attention.backends import cpu_attn

    isa, plan = cpu_attn._get_attn_isa, cpu_attn.ops.cpu_attn_get_scheduler_metadata

    def get_isa(dtype: Any, block_size: int, head_size: Any, _: Any) -> str:
        return isa(dtype, block_size, head_size)

    def get_plan(**given: Any) -> torch.Tensor:
        return plan(**{**given, "kv_cache_dtype": "auto"})

    patch.setattr(cpu_attn, "_get_attn_isa", get_isa)
    patch.setattr(cpu_attn.ops, "cpu_attn_get_scheduler_metadata", get_plan)


@functools.cache
def unrounded() -> list[list[int]]:
    return run_engine(NANO.target, None, *requests(), **ENGINE).token_ids


def test_fp8_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU kernels read fp8 caches on few processors only. So plain decoding keeps a float32
    cache here, of keys and values that are rounded before they are stored; DDTree's is one of fp8
    bytes, and the drafter's a float32 one, of another page size.
    """
    with monkeypatch.context() as patch:
        store_rounded_rows(patch)
        expected = run_engine(NANO.target, None, *requests(), **ENGINE).token_ids
    assert expected != unrounded(), "rounding makes no difference"

    allow_any_processor(monkeypatch)
    # Trees, positions, slots and the bytes that move, after every step.
    monkeypatch.setenv("VLLM_DDTREE_CHECK", "1")
    spec = ddtree(NANO, 20, kv_cache_dtype="auto")
    with open_engine(NANO.target, spec, kv_cache_dtype="fp8", **ENGINE) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        dtypes = {(layer.is_draft_layer, layer.kv_cache.dtype) for layer in layers}
        assert dtypes == {(False, torch.uint8), (True, torch.float32)}
        result = generate(llm, *requests())
    assert result.token_ids == expected
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens


def round_weights(folder: Path, dtype: torch.dtype) -> None:
    """Weights of every linear layer to 8 bits, one scale an output channel (compressed-tensors)."""
    path = folder / "model.safetensors"
    largest = {torch.int8: 127, torch.float8_e4m3fn: 448}[dtype]
    tensors = {}
    for name, weight in load_file(path).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(dim=1, keepdim=True) / largest
        rounded = weight.float() / scale
        tensors[name] = (rounded if dtype.is_floating_point else rounded.round()).to(dtype)
        tensors[name + "_scale"] = scale
    save_file(tensors, path)


def rounded_pair(folder: Path, dtype: torch.dtype) -> Pair:
    """Activations in 8 bits, too, one scale a token; the drafter's weights stay as they are."""
    kind = "float" if dtype.is_floating_point else "int"
    eight: dict[str, Any] = {"num_bits": 8, "type": kind, "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    pair = models.trained_pair(
        folder,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": f"{kind}-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": scheme},
        },
    )
    round_weights(pair.target, dtype)
    return pair


def test_int8_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    # On a processor with AMX vLLM takes a kernel that has no float32.
    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", lambda *_: False)
    pair = rounded_pair(tmp_path, torch.int8)
    expected = run_engine(pair.target, None, *requests(), **ENGINE).token_ids
    assert expected != unrounded(), "rounding makes no difference"
    result = run_engine(pair.target, ddtree(pair, 20), *requests(), **ENGINE)
    assert result.token_ids == expected


def test_fp8_weights(tmp_path: Path) -> None:
    """Another order of attention's sums, by a last bit of float32, may move an activation in fp8 by
    an eighth of its size. So texts may part, but only where the target's best tokens are nearly
    equal."""
    pair = rounded_pair(tmp_path, torch.float8_e4m3fn)
    prompts, params = PROMPTS[:4], [greedy(20, logprobs=20)] * 4
    plain = run_engine(pair.target, None, prompts, params, **ENGINE)
    with open_engine(pair.target, ddtree(pair, 20), **ENGINE) as llm:
        weight = model_runner(llm).model.model.layers[0].mlp.down_proj.weight
        assert weight.dtype == torch.float8_e4m3fn
        result = generate(llm, prompts, params)
    assert 0 < result.counters.num_accepted_tokens < result.counters.num_draft_tokens
    for ours, theirs in zip(result.outputs, plain.outputs, strict=True):
        texts = zip(ours.outputs[0].token_ids, theirs.outputs[0].token_ids, strict=True)
        parted = next((i for i, (a, b) in enumerate(texts) if a != b), None)
        if parted is not None:
            logprobs = theirs.outputs[0].logprobs[parted]
            best, chosen = max(e.logprob for e in logprobs.values()), ours.outputs[0].token_ids
            assert best - logprobs[chosen[parted]].logprob < 0.1
