# SPDX-License-Identifier: Apache-2.0
"""Tree attention on vLLM's Triton backend for multi-head latent attention."""

from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from vllm_ddtree import integration
from vllm_ddtree.attention.latent_forward import FORM, latent_forward
from vllm_ddtree.attention.latent_metadata import latent_tree_builder

__all__ = ["FORM", "TreeTritonMLAImpl"]


class TreeTritonMLAImpl(TritonMLAImpl):
    """vLLM's own prefill, and its decode kernel for batches of single rows."""

    tree_builder = staticmethod(latent_tree_builder)
    plain_forward = TritonMLAImpl.forward_mqa
    forward_mqa = latent_forward
    prefix_pass = None  # our own kernel's

    def reserve_workspace(self) -> None:
        """Called where the engine profiles its memory (vLLM 0.33), as the builder does later."""
        config = self._vllm_config
        # vLLM's form counts a tree's rows a request, which never reach its kernel: with long
        # contexts that is more memory than there is.
        integration.reserve_mla_workspace(
            config, config.scheduler_config.max_num_seqs, self.num_heads, self.kv_lora_rank
        )
