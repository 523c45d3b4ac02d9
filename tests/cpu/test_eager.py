# SPDX-License-Identifier: Apache-2.0
"""An engine that would compile its model is refused at once on the test bed, by every front end."""

from __future__ import annotations

import pytest

import ddtree_testbed
from tests.conftest import NANO


def test_an_engine_that_would_compile() -> None:
    ddtree_testbed.prepare()
    ddtree_testbed.prepare()  # once
    from vllm import LLM

    for more in ({}, {"enforce_eager": False}):
        with pytest.raises(ValueError, match="give --enforce-eager") as refused:
            LLM(model=str(NANO.target), max_model_len=64, dtype="float32", **more)
        assert "\n" not in str(refused.value)
