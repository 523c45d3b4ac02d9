# SPDX-License-Identifier: Apache-2.0
"""The oracle's rounds of a DSpark chain are those of vLLM's own method "dspark", one by one.

This anchors the oracle: where the anchor drafts, what the Markov head adds. (vLLM's walk of DFlash2
and LiLiCorr needs a GPU: tests/gpu/test_engine_conditional.py.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import conditional
from tests.conftest import NANO
from tests.engine.harness import PROMPTS, greedy, run_engine
from tests.oracle import Target
from tests.oracle import greedy as continuation
from tests.oracle.conditional import DSpark, LatticeTrace
from vllm_ddtree.tree.reference import Tree

MAX_MODEL_LEN = 136
MAX_TOKENS = (22, 99)  # the second request ends at the length limit


class ChainTrace(LatticeTrace):
    """A request, replayed with vLLM's chains."""

    drafter: DSpark

    def grow(
        self,
        position: int,
        budget: int,
        top_k: int,
        depth: int | None,
        chain: bool,
        num_masks: int,
        max_model_len: int | None,
    ) -> Tree:
        """As in `Trace`."""
        limit = self._limit(position, max_model_len)
        anchor = self.tokens[position]
        hidden = self.drafter.hidden(self.context, anchor, position, max_model_len=limit)
        tokens = np.array([0, *self.drafter.chain(hidden, anchor)])
        rows = np.arange(len(tokens))
        return Tree(
            tokens=tokens,
            parents=rows - 1,
            depths=rows,
            ranks=np.zeros_like(rows),
            scores=-rows.astype(np.float32),
            masks=rows[:, None] >= rows,
        )


@pytest.mark.parametrize("from_anchor", [False, True])
def test_vllm_counts_the_same_rounds(from_anchor: bool, tmp_path: Path) -> None:
    target = Target.load(NANO.target)
    engine: dict[str, Any] = {"block_size": 32, "max_model_len": MAX_MODEL_LEN}
    prompts, params = [PROMPTS[0], PROMPTS[5]], [greedy(n) for n in MAX_TOKENS]
    plain = run_engine(NANO.target, None, prompts, params, **engine)
    texts = []
    for request, n in zip(plain.outputs, MAX_TOKENS, strict=True):
        prompt = list(request.prompt_token_ids)
        texts.append((prompt, continuation(target, prompt, min(n, 40) + NANO.block_size)))
    pair = conditional.dspark(
        tmp_path, from_anchor=from_anchor, follow=[p + t for p, t in texts] if from_anchor else ()
    )
    depth = pair.block_size - (not from_anchor)
    chain: dict[str, Any] = {
        "method": "dspark",
        "model": str(pair.drafter),
        "num_speculative_tokens": depth,
    }
    detailed = {"per_request_spec_decode_metrics": "detailed"}
    result = run_engine(pair.target, chain, prompts, params, **engine, **detailed)
    drafter = DSpark.load(pair.drafter, target)
    num_accepted = 0
    for request, (prompt, known), max_tokens in zip(result.outputs, texts, MAX_TOKENS, strict=True):
        sample = request.outputs[0]
        assert list(sample.token_ids) == known[: len(sample.token_ids)]
        rounds = ChainTrace(target, drafter, prompt, known).replay(
            budget=depth,
            top_k=1,
            max_tokens=min(max_tokens, MAX_MODEL_LEN - len(prompt)),
            max_model_len=MAX_MODEL_LEN,
        )
        drafted = [r for r in rounds if r.num_nodes]
        metrics = sample.spec_decode_metrics
        assert metrics.per_step_accepted == [r.accepted for r in drafted]
        assert metrics.per_step_drafted == [r.num_nodes for r in drafted]
        num_accepted += sum(metrics.per_step_accepted)
    assert num_accepted > 10
