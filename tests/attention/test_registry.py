# SPDX-License-Identifier: Apache-2.0
"""The table of backends has what vLLM has, and the right backends are chosen from it."""

from typing import Any

import pytest
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_ddtree.attention.install import tree_backend
from vllm_ddtree.attention.registry import BACKENDS, backend, one_of, supported

from . import flashinfer_fakes, latent_fakes


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_extends_vllms_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By single inheritance, so that a loaded layer's implementation can become one."""
    latent_fakes.install(monkeypatch)
    flashinfer_fakes.install(monkeypatch)
    row = BACKENDS[name]
    kind: Any = AttentionBackendEnum[name].get_class()
    assert row.base() is kind.get_impl_cls()
    assert row.load().__bases__ == (row.base(),)
    assert row.implementation.startswith(f"vllm_ddtree.attention.backends.{name.lower()}:Tree")
    assert kind.is_mla() == row.latent


def test_what_is_supported() -> None:
    """The best first: a choice of vLLM's is replaced by the first that it takes."""
    assert supported(latent=False) == ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", "FLASHINFER")
    assert supported(latent=False, chosen=True) == ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
    assert supported(latent=True) == ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")
    for fp8 in ("fp8", "fp8_e4m3"):
        assert supported(False, fp8) == ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
        assert supported(True, fp8) == ("TRITON_MLA",)
    assert supported(False, "bfloat16") == supported(False)


def test_an_unknown_name_is_no_backend() -> None:
    assert backend("CPU_MLA") is None
    assert backend("TRITON_ATTN") is BACKENDS["TRITON_ATTN"]
    with pytest.raises(KeyError, match="CPU_MLA"):
        tree_backend(CPUMLABackend)


@pytest.mark.parametrize(
    ("name", "window", "words"),
    [
        ("FLASH_ATTN", None, "FlashAttention prefix + Triton tail"),
        ("FLASH_ATTN", 128, "Triton prefix + Triton tail"),
        ("TRITON_ATTN", 128, "Triton prefix + Triton tail"),
        ("CPU_ATTN", None, "PyTorch reference"),
        ("CPU_ATTN", 128, "PyTorch reference"),
    ],
)
def test_words(name: str, window: int | None, words: str) -> None:
    assert BACKENDS[name].words_of(window) == words


def test_names_in_words() -> None:
    assert one_of(("A",)) == "A"
    assert one_of(("A", "B")) == "A or B"
    assert one_of(("A", "B", "C")) == "A, B or C"
