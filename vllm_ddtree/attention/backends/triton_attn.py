# SPDX-License-Identifier: Apache-2.0
"""Tree attention on vLLM's Triton backend: both passes are ours, so it runs on any GPU."""

from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm_ddtree.attention.forward import tree_forward
from vllm_ddtree.attention.prefix_pass import FORM, triton_prefix
from vllm_ddtree.attention.variant import Variant

__all__ = ["FORM", "TreeTritonAttentionImpl"]


class TreeTritonAttentionImpl(TritonAttentionImpl):
    """vLLM's Triton attention for rows outside trees."""

    tree_variant = Variant()  # the layer's own takes its place
    plain_forward = TritonAttentionImpl.forward
    forward = tree_forward
    tree_prefix = triton_prefix
