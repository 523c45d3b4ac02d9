# SPDX-License-Identifier: Apache-2.0
"""What trees on recurrent targets are compared with: the test bed's plain decoding, in float32, is
Transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Pair
from tests.engine.harness import greedy, run_engine
from tests.engine.models import nemotron_h, qwen3_5, qwen3_next
from tests.oracle.hybrid import HybridTarget


@pytest.mark.parametrize("make", [qwen3_5, qwen3_next, nemotron_h])
def test_greedy_tokens(make: Callable[[Path], Pair], tmp_path: Path) -> None:
    """Prompts of one token, of several, and one in two chunks."""
    target = make(tmp_path).target
    prompts = [[3, 5, 7, 9, 2, 4] * 12, [1], [7] * 20]
    result = run_engine(
        target, None, prompts, greedy(12), max_num_batched_tokens=64, skip_tokenizer_init=True
    )
    reference = HybridTarget.load(target)
    assert result.token_ids == [reference.greedy(prompt, 12) for prompt in prompts]
