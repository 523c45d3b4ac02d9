# SPDX-License-Identifier: Apache-2.0
"""Test-only Triton backend "cpu" (no code generation; for TRITON_INTERPRET=1)."""
