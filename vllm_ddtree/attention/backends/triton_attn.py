# SPDX-License-Identifier: Apache-2.0
"""Tree attention on vLLM's Triton backend: both passes are ours, so it runs on any GPU."""

from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm_ddtree.attention.forward.plain import tree_forward
from vllm_ddtree.attention.forward.triton_prefix import triton_prefix_pass
from vllm_ddtree.attention.layer import Variant


class TreeTritonAttentionImpl(TritonAttentionImpl):
    """Our Triton kernels for prefix and tail, vLLM's Triton attention for rows outside trees."""

    vllm_impl = TritonAttentionImpl
    tree_variant = Variant()  # the layer's own takes its place
    plain_forward = TritonAttentionImpl.forward
    forward = tree_forward
    prefix_pass = triton_prefix_pass
