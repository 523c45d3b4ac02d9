# SPDX-License-Identifier: Apache-2.0
"""How a step verifies: its rows classified, and whether its trees become chains.

A step that has prefills beside trees (a mixed step) runs its attention outside the CUDA graph. The
host launches that attention layer by layer. In a small step the GPU waits for the host. Chains need
no launch beyond vLLM's own, so they are the faster kind there. In a large step the launches hide
behind the prefill, and trees are faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_ddtree.round.kinds import RoundKind
from vllm_ddtree.round.step import Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MIXED_TREE_TOKENS = 1024
"""Tokens from which a mixed step verifies trees, at a hidden size of 4096 on one GPU."""


def mixed_tree_tokens(vllm_config: VllmConfig) -> float:
    """Tokens from which an engine's mixed steps verify trees; fewer: chains."""
    if vllm_config.model_config.use_mla:
        # Latent attention verifies chains by the same kernels as trees.
        return 0
    # A layer's work grows with tokens times the square of the hidden size.
    size = vllm_config.model_config.get_hidden_size() / 4096
    shards = vllm_config.parallel_config.tensor_parallel_size
    return MIXED_TREE_TOKENS * shards / size**2


def plan_step(
    num_rows: np.ndarray,
    num_logits: np.ndarray,
    num_tokens: int,
    mixed_tree_tokens: float,
    chains_asked: bool,
    in_graph: bool,
) -> Step:
    """Classify the rows of a step and decide how it verifies.

    Args:
        num_rows: int [num_reqs], rows of each request.
        num_logits: int [num_reqs], logits of each request; n > 1 logits are n tree rows.
        num_tokens: rows of the batch.
        mixed_tree_tokens: rows from which a mixed step verifies trees.
        chains_asked: whether the scheduler, or a capture, wants chains.
        in_graph: whether a CUDA graph is captured.

    Returns:
        The step, without its batch.

    """
    most = int(num_logits.max())
    tree_lens = np.where(num_logits > 1, num_logits, 0)
    has_plain_rows = bool((num_logits != num_rows).any() or (num_logits == 1).any())
    mixed = has_plain_rows and most > 1 and not in_graph
    small = mixed and num_tokens < mixed_tree_tokens
    as_chains = small or (chains_asked and not has_plain_rows)
    return Step(
        # A tree of one node is a chain.
        has_trees=most > 2 and not as_chains,
        max_verify_len=int(num_rows[num_logits > 1].max(initial=0)),
        num_tree_rows=int(tree_lens.sum()),
        tree_lens=tree_lens,
        as_chains=as_chains,
        has_plain_rows=has_plain_rows,
        in_graph=in_graph,
        kind=RoundKind.MIXED if small else RoundKind.CHOSEN if as_chains else RoundKind.TREE,
    )


def plan_shared_step(num_rows: np.ndarray, num_tokens: int) -> Step:
    """A step whose requests share its nodes: how many each one verifies, only the device knows.

    Args:
        num_rows: int [num_reqs], most rows of each request.
        num_tokens: rows of the batch.

    """
    most = int(num_rows.max())
    return Step(
        has_trees=most > 2,
        max_verify_len=most,
        num_tree_rows=num_tokens,
        shared=True,
        has_plain_rows=False,
    )
