# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ddtree`: `check`, `inspect`, `tune`, `bench`, `demo`."""
