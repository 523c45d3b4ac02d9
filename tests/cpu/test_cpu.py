# SPDX-License-Identifier: Apache-2.0
"""The CPU test bed's work-arounds for vLLM are right, and act only where they are asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

import ddtree_testbed

STATE = """
from vllm.v1.sample.ops import topk_topp_sampler as s
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model as m
print(s.apply_top_k_top_p_triton is s.apply_top_k_top_p_pytorch, m._normalize_context_k.__module__)
"""


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_context_keys_are_normalised_with_each_layers_own_weight() -> None:
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    ddtree_testbed.prepare()

    class Drafter:
        _k_norm_weights = torch.randn(3, 64)
        _rms_norm_eps = 1e-6

    keys = torch.randn(3, 5, 2, 64)  # [layers, tokens, kv heads, head size]
    normed = DFlashQwen3Model._normalize_context_k(Drafter(), keys)
    variance = keys.pow(2).mean(-1, keepdim=True)
    expected = keys * torch.rsqrt(variance + 1e-6) * Drafter._k_norm_weights[:, None, None, :]
    torch.testing.assert_close(normed, expected)


def test_the_plugin_alone_patches_nothing_of_the_test_bed() -> None:
    register = "from vllm_ddtree import plugin; plugin.register()"
    assert run_python(f"{register}\n{STATE}") == ("False vllm.model_executor.models.qwen3_dflash")


def test_vllm_applies_the_work_arounds_in_its_processes() -> None:
    load = "from vllm.plugins import load_general_plugins; load_general_plugins()"
    assert run_python(f"{load}\n{STATE}") == "True ddtree_testbed.engine"


def test_switched_off_the_test_bed_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DDTREE_CPU_TESTBED", "0")
    (point,) = entry_points(group="vllm.general_plugins", name="ddtree_testbed")
    code = f"from {point.module} import {point.attr}; {point.attr}()"
    assert run_python(f"{code}\n{STATE}").startswith("False")


def test_models_with_a_vision_tower_import_without_torchvision() -> None:
    code = """
import ddtree_testbed
ddtree_testbed.prepare()
from transformers.utils import is_torchvision_available
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
print(Qwen3_5ForCausalLM.__name__, is_torchvision_available())
"""
    assert run_python(code) == "Qwen3_5ForCausalLM False"
