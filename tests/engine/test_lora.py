# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on the target, by request, beside requests without: plain decoding's tokens.

The drafter is the base model's. What it drafts for an adapter is what it drafts for a target with
that adapter merged into its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conftest import Pair
from tests.engine.adapters import make_adapter, merged, no_adapter_is_none
from tests.engine.harness import PROMPTS, ddtree, generate, greedy, keep_async, open_engine
from vllm_ddtree import integration

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

LONG = PROMPTS[5]
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 5}
MAX_LORAS = 2
ENGINE: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": MAX_LORAS,
    "max_cpu_loras": 3,
    "max_lora_rank": 8,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": True,
    "block_size": 32,
}
ROUNDS: dict[str, Any] = {"per_request_spec_decode_metrics": "detailed", "block_size": 32}
# (prompt, adapter, parameters): one prompt with several adapters and without; more adapters than
# may be active at once.
REQUESTS: list[tuple[str, str | None, dict[str, Any]]] = [
    (LONG, None, {}),
    (LONG, "a", {}),
    (LONG, "head", SEEDED),
    (PROMPTS[3], "b", {}),
    (PROMPTS[3], "a", SEEDED),
    (PROMPTS[0], None, SEEDED),
    (LONG, "head", {}),
]
TOKENS = 16
ALONE = [PROMPTS[0], PROMPTS[3]]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, nano_pair: Pair) -> dict[str, Path]:
    folder, target = tmp_path_factory.mktemp("adapters"), nano_pair.target
    return {
        "a": make_adapter(folder / "a", target, 1, 0.2),
        "b": make_adapter(folder / "b", target, 2, 0.3),
        "head": make_adapter(folder / "head", target, 3, 0.25, lm_head=True),
        "late": make_adapter(folder / "late", target, 4, 0.2),
    }


def lora(adapters: dict[str, Path], name: str | None) -> LoRARequest | None:
    from vllm.lora.request import LoRARequest

    return name and LoRARequest(name, sorted(adapters).index(name) + 1, str(adapters[name]))


@dataclass
class Served:
    """Tokens of the requests, and accepted nodes of each round of some."""

    first: list[list[int]]
    again: list[list[int]]
    moving: dict[str, list[int]]
    rounds: list[list[int]]


def serve(llm: LLM, adapters: dict[str, Path]) -> Served:
    """The requests at once, twice; then adapters that come and go; then adapter a alone."""
    params = [greedy(TOKENS - i, **more) for i, (_, _, more) in enumerate(REQUESTS)]
    prompts = [prompt for prompt, _, _ in REQUESTS]
    loras = [lora(adapters, name) for _, name, _ in REQUESTS]

    def tokens(outputs: Any) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in outputs]

    first = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
    again = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
    moving = come_and_go(llm, adapters)
    alone = llm.generate(
        ALONE, greedy(24), use_tqdm=False, lora_request=[lora(adapters, "a")] * len(ALONE)
    )
    metrics = [output.outputs[0].spec_decode_metrics for output in alone]
    rounds = [list(m.per_step_accepted) for m in metrics if m is not None]
    return Served(tokens(first), tokens(again), moving, rounds)


def come_and_go(llm: LLM, adapters: dict[str, Path]) -> dict[str, list[int]]:
    """Adapters are loaded and unloaded while requests run that have others."""
    engine = llm.llm_engine
    engine.add_request("b", LONG, greedy(20), lora_request=lora(adapters, "b"))
    engine.add_request("base", PROMPTS[0], greedy(20))
    finished: dict[str, list[int]] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == 3:
            late = lora(adapters, "late")
            assert late is not None and engine.add_lora(late)
            assert late.lora_int_id in engine.list_loras()
            engine.add_request("late", LONG, greedy(14, **SEEDED), lora_request=late)
        if steps == 5:
            gone = lora(adapters, "head")
            assert gone is not None
            engine.remove_lora(gone.lora_int_id)
            assert gone.lora_int_id not in engine.list_loras()
    return finished


def check_dummy_rounds(llm: LLM) -> None:
    """What the automatic budget measures (on a GPU): every request has an adapter."""
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    mappings = []
    chosen = runner.lora_manager.set_active_adapters

    def note(requests: Any, mapping: Any) -> None:
        mappings.append(mapping)
        chosen(requests, mapping)

    runner.lora_manager.set_active_adapters = note
    with torch.inference_mode(), integration.dummy_adapters(runner):
        _, logits = integration.dummy_step(runner, 3, 16, lambda output: None)
    assert logits.shape[0] == 48
    (mapping,) = mappings
    rows = [*[1] * 16, *[2] * 16, *[1] * 16]
    assert list(mapping.index_mapping) == list(mapping.prompt_mapping) == rows
    assert not runner.list_loras()


def test_requests_with_adapters_and_without(
    nano_pair: Pair,
    adapters: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_adapter_is_none(monkeypatch)
    with open_engine(nano_pair.target, None, **ENGINE) as llm:
        expected = serve(llm, adapters)
    same_prompt = [expected.first[i] for i in (0, 1, 6)]
    assert len({tuple(tokens[:8]) for tokens in same_prompt}) == 3, "adapters that change nothing"

    keep_async(monkeypatch)
    with open_engine(nano_pair.target, ddtree(nano_pair, 15), **{**ENGINE, **ROUNDS}) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        got = serve(llm, adapters)
        check_dummy_rounds(llm)
    assert got.first == expected.first
    assert got.again == expected.again == expected.first
    assert got.moving == expected.moving and len(got.moving) == 3

    # The drafter's context is that of the adapted target.
    target = merged(tmp_path / "merged", nano_pair.target, adapters["a"])
    with open_engine(target, ddtree(nano_pair, 15), **ROUNDS) as llm:
        result = generate(llm, ALONE, greedy(24))
    rounds = [list(o.outputs[0].spec_decode_metrics.per_step_accepted) for o in result.outputs]
    assert got.rounds == rounds
    assert sum(map(sum, rounds)) > 0
