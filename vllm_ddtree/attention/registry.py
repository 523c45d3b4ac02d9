# SPDX-License-Identifier: Apache-2.0
"""Attention backends and caches of vLLM on which the target's trees can be verified.

A new backend is one row here and one file in `backends/`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

FP8_CACHES = ("fp8", "fp8_e4m3")
"""vLLM's two names of caches in 8-bit floating point with one scale a layer, or a KV head."""


@dataclass(frozen=True)
class Backend:
    """A backend of vLLM, and how trees are verified on it."""

    name: str
    """vLLM's, e.g. FLASH_ATTN."""
    implementation: str
    """"module:Class" of the tree-aware implementation, imported when it is used."""
    words: str
    """How it verifies, for the start-up line."""
    latent: bool = False
    """Whether it is for multi-head latent attention."""
    window_words: str | None = None
    """`words` of a layer with a sliding window, where they differ."""
    fp8_cache: bool = False
    """Whether it takes a cache in `FP8_CACHES`."""
    shares: bool = False
    """Whether it takes the rows of each request from the device, so that requests can share."""
    chosen: bool = True
    """Whether it may replace a choice of vLLM's that cannot verify trees."""

    def load(self) -> type:
        """The tree-aware implementation class."""
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(module), name)

    def base(self) -> type:
        """vLLM's implementation class, which the tree-aware one extends."""
        return self.load().vllm_impl  # type: ignore[attr-defined]

    def words_of(self, window: int | None) -> str:
        """How it verifies in a layer with this sliding window, None: without one."""
        return self.window_words if window and self.window_words else self.words


_HERE = "vllm_ddtree.attention.backends"
_TRITON = "Triton prefix + Triton tail"

BACKENDS: dict[str, Backend] = {
    row.name: row
    for row in (
        Backend(
            "FLASH_ATTN",
            f"{_HERE}.flash_attn:TreeFlashAttentionImpl",
            "FlashAttention prefix + Triton tail",
            window_words=_TRITON,
            fp8_cache=True,
            shares=True,
        ),
        Backend(
            "TRITON_ATTN",
            f"{_HERE}.triton_attn:TreeTritonAttentionImpl",
            _TRITON,
            fp8_cache=True,
            shares=True,
        ),
        Backend(
            "CPU_ATTN",
            f"{_HERE}.cpu_attn:TreeCPUAttentionImpl",
            "PyTorch reference",
            fp8_cache=True,
            shares=True,
        ),
        Backend(
            "FLASHINFER",
            f"{_HERE}.flashinfer:TreeFlashInferImpl",
            "FlashInfer prefix + Triton tail",
            window_words=_TRITON,
            chosen=False,
        ),
        Backend(
            "FLASH_ATTN_MLA",
            f"{_HERE}.flash_attn_mla:TreeFlashAttnMLAImpl",
            "FlashAttention latent prefix + Triton latent tail",
            latent=True,
        ),
        Backend(
            "FLASHMLA",
            f"{_HERE}.flashmla:TreeFlashMLAImpl",
            "FlashMLA latent prefix + Triton latent tail",
            latent=True,
        ),
        Backend(
            "TRITON_MLA",
            f"{_HERE}.triton_mla:TreeTritonMLAImpl",
            "Triton latent prefix + Triton latent tail",
            latent=True,
            fp8_cache=True,
        ),
    )
}
"""By name; for plain attention and for latent attention, the best first."""


def backend(name: str) -> Backend | None:
    """The row of vLLM's backend of this name; None: trees cannot be verified on it."""
    return BACKENDS.get(name)


def supported(latent: bool, cache_dtype: str = "auto", chosen: bool = False) -> tuple[str, ...]:
    """Names of the backends that can verify trees, the best first.

    Args:
        latent: of multi-head latent attention, or of plain attention.
        cache_dtype: vLLM's `--kv-cache-dtype`.
        chosen: only those that may replace a choice of vLLM's.

    """
    return tuple(
        row.name
        for row in BACKENDS.values()
        if row.latent == latent
        and (row.fp8_cache or cache_dtype not in FP8_CACHES)
        and (row.chosen or not chosen)
    )


def one_of(names: tuple[str, ...]) -> str:
    """The names in words: A, B or C."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
