# SPDX-License-Identifier: Apache-2.0
"""The demo: `python -m vllm_ddtree.demo`."""
