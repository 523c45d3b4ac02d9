# SPDX-License-Identifier: Apache-2.0
"""One file a backend of vLLM, named after it; `flashinfer_prefix` is FlashInfer's prefix pass.

Each has a tree-aware subclass of vLLM's implementation, and where the backend needs one, of its
metadata builder. `registry` lists the classes.
"""
