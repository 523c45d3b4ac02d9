# SPDX-License-Identifier: Apache-2.0
"""Attention backends and caches of vLLM on which the target's trees can be verified."""

CHOSEN_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""Those taken where vLLM's own choice is none of them, the best first."""
SUPPORTED_BACKENDS = (*CHOSEN_BACKENDS, "FLASHINFER")
FP8_BACKENDS = CHOSEN_BACKENDS
"""Those that take a cache in `FP8_CACHES`."""
SUPPORTED_MLA_BACKENDS = ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")  # the best first
"""For targets with multi-head latent attention."""
FP8_CACHES = ("fp8", "fp8_e4m3")
"""vLLM's two names of caches in 8-bit floating point with one scale a layer, or a KV head."""
FP8_MLA_BACKENDS = ("TRITON_MLA",)
"""Those of the MLA backends that take such a cache."""


def one_of(names: tuple[str, ...]) -> str:
    """The names in words: A, B or C."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
