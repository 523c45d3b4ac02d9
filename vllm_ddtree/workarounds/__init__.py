# SPDX-License-Identifier: Apache-2.0
"""What vLLM does otherwise than its users expect, and what is done about it here.

Each file says which behaviour of vLLM it works around, and when it can go.
"""
