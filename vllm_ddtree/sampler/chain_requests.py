# SPDX-License-Identifier: Apache-2.0
"""Requests that verify their chain alone.

vLLM's penalties, bad words, thinking budget, grammars and custom logits processors take the
preceding rows of a request as tokens already generated. In a tree these rows include siblings. So
such a request gets the chain alone, inside the same rows, and vLLM's own processing is right as it
stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

if TYPE_CHECKING:
    import numpy as np
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from vllm_ddtree.round.trees import TreeBuffers


class ChainRequests:
    """Which requests verify their chain alone, on the host; `apply` brings it to the device.

    Args:
        max_num_reqs: most requests.

    """

    def __init__(self, max_num_reqs: int) -> None:
        self.all = False
        """Whether all requests do, for the sake of the engine's logits processors."""
        self._flags = UvaBackedTensor(max_num_reqs, torch.int32)  # by index
        self._stale = False

    def add(self, index: int, sampling_params: SamplingParams | None) -> None:
        """A new request has this index."""
        chain = self.all or needs_chain(sampling_params)
        if self._flags.np[index] != chain:
            self._flags.np[index] = chain
            self._stale = True

    def apply(self, trees: TreeBuffers) -> None:
        """Bring what has changed to `trees.chain_only`."""
        if self._stale:
            trees.chain_only.copy_(self._flags.copy_to_uva())
            self._stale = False

    def of(self, indices: np.ndarray) -> np.ndarray:
        """int32 [num_reqs], not 0 for the requests (by index) that do."""
        return self._flags.np[indices]


def needs_chain(sampling_params: SamplingParams | None) -> bool:
    """Whether the parameters depend on the tokens before a row."""
    if sampling_params is None:
        return False
    p = sampling_params
    return bool(
        p.presence_penalty
        or p.frequency_penalty
        or p.repetition_penalty != 1.0
        or p.bad_words
        or p.structured_outputs is not None
        or getattr(p, "thinking_token_budget", None) is not None
        or getattr(p, "repetition_detection", None) is not None
    )


def has_custom_processors(sampler: Sampler) -> bool:
    """Whether a sampler runs logits processors of the user's.

    They are given to the engine, or installed as entry points (vLLM's
    v1/worker/gpu/sample/logits_processor/loader.py).
    """
    from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
    from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

    own = (LogitBiasState, PenaltiesState, BadWordsState)
    return any(not isinstance(processor, own) for processor in sampler.logits_processors)
