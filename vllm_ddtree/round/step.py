# SPDX-License-Identifier: Apache-2.0
"""The verify step in progress, as the host knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_ddtree.round.kinds import RoundKind, StepKinds


@dataclass
class Step:
    """Host-side facts of the verify step in progress.

    The first fields say what rows the step has and follow from `plan_step`. The others are vLLM's
    batch, and how far the step has come.
    """

    has_trees: bool = False
    """Whether any request verifies drafts that are no chain: the attention needs the tree."""
    max_verify_len: int = 0
    """Rows of the longest request that verifies drafts, rows before its tree included; 0: none."""
    num_tree_rows: int = 0
    """Rows of all trees."""
    tree_lens: np.ndarray | None = None
    """int [num_reqs], tree rows of each request; 0 without a tree. None: only the device knows."""
    shared: bool = False
    """Whether the requests share the step's nodes, so that a tree may be a root alone."""
    as_chains: bool = False
    """Whether the trees of the batch are turned into chains."""
    has_plain_rows: bool = True
    """Whether any row of the batch belongs to no tree (prefill, plain decode)."""
    in_graph: bool = False
    """Whether the step is a CUDA graph's capture or its dummy replay."""
    kind: RoundKind = RoundKind.TREE
    """The kind of a request that may verify a tree."""

    num_reqs: int = 0
    """Requests of the batch."""
    req_ids: list[str] = field(default_factory=list)
    """vLLM's ids of the batch's requests."""
    query_start_loc: torch.Tensor | None = None
    """int32 [num_reqs + 1], first row of each request."""
    slot_mappings: torch.Tensor | None = None
    """int64 [num_kv_groups, num_tokens], the target's KV slot of each row."""
    kinds: StepKinds | None = None
    """How each request verifies; None in a graph's capture."""
    verified: bool = False
    """Whether the tree sampler ran, so that there is a path to commit."""
