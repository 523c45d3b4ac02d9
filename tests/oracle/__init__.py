# SPDX-License-Identifier: Apache-2.0
"""The offline oracle: what a target and a DFlash drafter do, in plain PyTorch, without vLLM.

    target = Target.load("models/nano")
    drafter = Drafter.load("models/nano-dflash", target)
    output_ids = greedy(target, prompt_ids, 96 + drafter.block_size)
    rounds = Trace(target, drafter, prompt_ids, output_ids).replay(budget=31, top_k=64)
    [r.accepted for r in rounds]

The accepted counts of an engine's request must equal these, round by round.
"""

from .dflash import Drafter
from .qwen3 import Target, greedy
from .replay import Round, Trace, acceptance_length

__all__ = ["Drafter", "Round", "Target", "Trace", "acceptance_length", "greedy"]
