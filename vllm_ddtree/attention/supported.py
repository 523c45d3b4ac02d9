# SPDX-License-Identifier: Apache-2.0
"""Attention backends of vLLM on which the target's trees can be verified."""

SUPPORTED_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
SUPPORTED_MLA_BACKENDS = ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")  # the best first
"""For targets with multi-head latent attention."""


def one_of(names: tuple[str, ...]) -> str:
    """The names in words: A, B or C."""
    return f"{', '.join(names[:-1])} or {names[-1]}"
