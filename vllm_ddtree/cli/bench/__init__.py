# SPDX-License-Identifier: Apache-2.0
"""`vllm-ddtree bench`: methods side by side under load, and which of them to use.

`vllm bench serve` of the installed vLLM makes the load (`client`). Servers run already, or are
started one after the other (`servers`).
"""
