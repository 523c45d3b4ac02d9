# SPDX-License-Identifier: Apache-2.0
"""Drafters with the config.json of published ones load, draft and verify, or are refused by name.

Weights are random and sizes small; what decides how such a drafter drafts is as published.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import ddtree, open_engine, run_engine
from tests.engine.models import VOCABULARY
from tests.published import PUBLISHED, Published, small_pair

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 3,
    "block_size": 32,
    "max_model_len": 160,
}
PROMPTS = [[(7 * i * i + i * n) % VOCABULARY for i in range(n)] for n in (90, 3, 33)]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: p.name)
def test_published(published: Published, tmp_path: Path) -> None:
    from vllm import SamplingParams

    pair = small_pair(published, tmp_path)
    spec = ddtree(pair, 15)
    if published.refused:
        start = open_engine(pair.target, spec, **ENGINE)
        with pytest.raises(ValueError, match=published.refused), start:
            pass
        return
    params = [
        SamplingParams(temperature=t, seed=5, max_tokens=n, ignore_eos=True, detokenize=False)
        for t, n in ((0.0, 14), (0.8, 12), (0.0, 10))
    ]
    result = run_engine(pair.target, spec, PROMPTS, params, **ENGINE)
    expected = run_engine(pair.target, None, PROMPTS, params, **ENGINE)
    assert result.token_ids == expected.token_ids
    assert result.counters.num_draft_tokens == 15 * result.counters.num_drafts
    assert result.counters.num_accepted_tokens > 0
