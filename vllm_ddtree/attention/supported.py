# SPDX-License-Identifier: Apache-2.0
"""Attention backends of vLLM on which the target's trees can be verified."""

SUPPORTED_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
SUPPORTED_MLA_BACKENDS = ("TRITON_MLA",)
"""For targets with multi-head latent attention."""
