# SPDX-License-Identifier: Apache-2.0
"""Tree attention on vLLM's Triton backend for multi-head latent attention: both passes are ours."""

from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from vllm_ddtree import integration
from vllm_ddtree.attention.forward.latent import latent_forward
from vllm_ddtree.attention.metadata.latent import latent_tree_builder
from vllm_ddtree.integration.attention import impl_config


class TreeTritonMLAImpl(TritonMLAImpl):
    """Our Triton kernels for prefix and tail, vLLM's own prefill, and its decode kernel for batches
    of single rows."""

    vllm_impl = TritonMLAImpl
    tree_builder = staticmethod(latent_tree_builder)
    plain_forward = TritonMLAImpl.forward_mqa
    forward_mqa = latent_forward
    prefix_pass = None  # our own kernel's

    def reserve_workspace(self) -> None:
        """Called where the engine profiles its memory (vLLM 0.33), as the builder does later."""
        config = impl_config(self)
        # vLLM's own method counts a tree's rows a request, which never reach its kernel: with long
        # contexts that is more memory than there is.
        integration.reserve_mla_workspace(
            config, config.scheduler_config.max_num_seqs, self.num_heads, self.kv_lora_rank
        )
