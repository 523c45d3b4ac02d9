# SPDX-License-Identifier: Apache-2.0
"""What the rounds that are measured at start wake in a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.forward_context import get_forward_context

from tests.engine import models
from tests.engine.harness import ddtree, open_engine
from vllm_ddtree import integration
from vllm_ddtree.budget.cost import TREE, _round

if TYPE_CHECKING:
    from vllm import LLM

ENGINE = {"max_model_len": 256, "skip_tokenizer_init": True}
EXPERTS, WOKEN_BY_A_ROW = 64, 3
REQUESTS, ROWS = 4, 8


@contextmanager
def counted(model: torch.nn.Module) -> Iterator[list[set[int]]]:
    """The experts that each call of a gate wakes: rows that are padding wake none."""
    woken: list[set[int]] = []

    def note(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, Any]) -> None:
        logits = output[0]
        padding = get_forward_context().is_padding
        assert padding is not None
        chosen = logits[~padding[: len(logits)]].topk(WOKEN_BY_A_ROW, dim=-1).indices
        woken.append(set(chosen.flatten().tolist()))

    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    assert gates
    hooks = [gate.register_forward_hook(note) for gate in gates]
    try:
        yield woken
    finally:
        for hook in hooks:
            hook.remove()


def experts(llm: LLM, like_text: bool) -> list[set[int]]:
    """Of a round of trees, by layer."""
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    rows = integration.like_text(runner) if like_text else nullcontext()
    with torch.inference_mode(), counted(runner.model) as woken, rows:
        _round(runner, ROWS, REQUESTS, TREE)
    return woken


@pytest.mark.parametrize("embeddings", [False, True])
def test_rounds_wake_as_many_experts_as_text(embeddings: bool, tmp_path: Path) -> None:
    """Also where the target is given embeddings in place of tokens."""
    pair = models.qwen3_moe(tmp_path, num_experts=EXPERTS, num_experts_per_tok=WOKEN_BY_A_ROW)
    keys = {**ENGINE, "enable_prompt_embeds": embeddings}
    with open_engine(pair.target, ddtree(pair, 15), **keys) as llm:
        assert not any(experts(llm, like_text=False))
        first, second = experts(llm, like_text=True), experts(llm, like_text=True)
        assert first == second, "not the same on all ranks"
        for woken in first:
            assert len(woken) > EXPERTS / 2
        assert not any(experts(llm, like_text=False)), "it stays behind"
