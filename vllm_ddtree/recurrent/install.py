# SPDX-License-Identifier: Apache-2.0
"""Give the target's recurrent layers their tree-aware core and metadata.

Runs after the weights are loaded, before vLLM asks the layers for their states' sizes, measures
memory and makes attention groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase

from vllm_ddtree.recurrent.kinds import KINDS
from vllm_ddtree.recurrent.metadata import tree_backend
from vllm_ddtree.recurrent.target import RecurrentTarget

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_ddtree.round.runtime import Runtime


def recurrent_layers(vllm_config: VllmConfig) -> dict[str, MambaBase]:
    """A model's recurrent layers by name. Drafters have none."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if isinstance(layer, MambaBase)}


def install_recurrent(
    vllm_config: VllmConfig, runtime: Runtime, device: torch.device
) -> RecurrentTarget | None:
    """Make every recurrent layer of the target tree-aware.

    Each of them can verify trees: `config.loaded_target.check_loaded_target` has looked at it.

    Args:
        vllm_config: the engine's.
        runtime: the engine's.
        device: of the worker.

    Returns:
        The layers together; None if the target has none.

    Raises:
        ValueError: layers of different kinds or shapes.

    """
    layers = recurrent_layers(vllm_config)
    if not layers:
        return None
    for layer in layers.values():
        # A layer widens its states by this number. Ours need no room for drafts.
        layer.num_spec = 0
    kinds = {type(layer) for layer in layers.values()}
    if len(kinds) > 1:
        raise ValueError("recurrent layers of different kinds")
    kind = KINDS[kinds.pop()]
    backend = tree_backend(kind.backend)
    target = RecurrentTarget(vllm_config, layers, kind, runtime, device)
    for name, layer in layers.items():
        layer.tree_target = target
        layer.get_attn_backend = lambda: backend
        kind.set_core(name, layer, target)
    return target
