# SPDX-License-Identifier: Apache-2.0
"""How many blocks of recurrent states a request has, and how large they are.

vLLM keeps a block, and a place in the convolution's state, for every token of a draft. Trees keep
none: a step's rows are stashed elsewhere until the path is known (`recurrent/`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ddtree.presence import is_ddtree

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig


def get_kv_cache_spec(original: Callable[..., Any]) -> Callable[..., Any]:
    """`MambaBase.get_kv_cache_spec`."""

    def get(self: Any, vllm_config: VllmConfig) -> Any:
        spec = original(self, vllm_config)
        if spec is None or not is_ddtree(vllm_config.speculative_config):
            return spec
        return dataclasses.replace(spec, num_speculative_blocks=0)

    return get


def align_hybrid_block_size(original: Callable[..., None]) -> Callable[..., None]:
    """`Platform._align_hybrid_block_size`, which asks the target's class for its states' shapes.

    It changes the cache's configuration, which is the same in the copy.
    """

    def align(cls: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        if is_ddtree(vllm_config.speculative_config):
            vllm_config = copy.copy(vllm_config)
            vllm_config.speculative_config = None
        original(cls, vllm_config, *args, **kwargs)

    return align
