# SPDX-License-Identifier: Apache-2.0
"""One vLLM CPU engine a call, with the settings and prompts of the engine tests.

from tests.engine.harness import PROMPTS, dflash, ddtree, greedy, run_engine

result = run_engine(pair.target, ddtree(pair, budget=15), PROMPTS, greedy(48))
result.token_ids, result.counters.acceptance_length
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ddtree.testing import engine
from vllm_ddtree.testing.engine import Counters, Prompt, Result, generate

if TYPE_CHECKING:
    import pytest
    from vllm import LLM, SamplingParams

    from tests.conftest import Pair

__all__ = [
    "PROMPTS",
    "Counters",
    "Draft",
    "Result",
    "ddtree",
    "dflash",
    "generate",
    "greedy",
    "keep_async",
    "open_engine",
    "run_engine",
    "watch_reaches",
]

# Python code of different lengths; one token, and one that fills several KV blocks, among them.
PROMPTS = [
    "def main(argv):\n    return ",
    "x",
    "import os\nimport sys\n\nclass A:",
    "for x in range(10):\n    print(x)\nfor x in range(10):\n",
    "# comment\n",
    (
        "class Queue:\n"
        '    """A first-in first-out queue of limited size."""\n\n'
        "    def __init__(self, size):\n"
        "        self.size = size\n"
        "        self.items = []\n\n"
        "    def put(self, item):\n"
        "        if len(self.items) >= self.size:\n"
        "            raise ValueError('queue is full')\n"
        "        self.items.append(item)\n\n"
        "    def get(self):\n"
        "        if not self.items:\n"
        "            raise"
    ),
]

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "disable_log_stats": False,
    "seed": 0,
}


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Temperature 0, exactly `max_tokens` tokens unless `more` says otherwise."""
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **more}
    )


def dflash(pair: Pair, num_speculative_tokens: int | None = None, **more: Any) -> dict[str, Any]:
    """speculative_config of vLLM's own chain, by default as long as the drafter's block allows."""
    depth = num_speculative_tokens or pair.block_size - 1
    return {
        "method": "dflash",
        "model": str(pair.drafter),
        "num_speculative_tokens": depth,
        **more,
    }


def ddtree(pair: Pair, budget: int, **more: Any) -> dict[str, Any]:
    """speculative_config of DDTree."""
    return {"method": "ddtree", "model": str(pair.drafter), "budget": budget, **more}


@contextmanager
def open_engine(
    target: str | Path, spec: dict[str, Any] | None = None, **llm_kwargs: Any
) -> Iterator[LLM]:
    """`vllm_ddtree.testing.engine.open_engine` on the CPU test bed, with `DEFAULTS`."""
    # Not at the head: tests/gpu reads PROMPTS where there is no test bed.
    from vllm.tokenizers import cached_get_tokenizer

    import ddtree_testbed
    from ddtree_testbed.garbage import keep_modules

    ddtree_testbed.prepare()
    with engine.open_engine(target, spec, **{**DEFAULTS, **llm_kwargs}) as llm:
        yield llm
    # An engine with prompt embeddings adds a token to the tokenizer that all engines share.
    cached_get_tokenizer.cache_clear()
    keep_modules()


def run_engine(
    target: str | Path,
    spec: dict[str, Any] | None,
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    **llm_kwargs: Any,
) -> Result:
    """All prompts at once through a new engine, with one SamplingParams or one a prompt."""
    with open_engine(target, spec, **llm_kwargs) as llm:
        return generate(llm, prompts, sampling_params)


def keep_async(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous scheduling, which vLLM turns off on the CPU."""
    from vllm.platforms import current_platform

    check = current_platform.check_and_update_config

    def keep(_: Any, vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(keep))


@dataclass(frozen=True)
class Draft:
    """One draft of an engine."""

    nodes: int
    """To verify in the next step, of each request."""
    verified: int
    """Of the longest tree that the step verified."""
    positions: int
    """Its reach."""
    masks: int | None = None
    """Masks of a narrow draft."""


def watch_reaches(monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """Every draft from now on, dummy ones left out; grows while engines serve."""
    from vllm_ddtree.proposer.speculator import DDTreeSpeculator

    drafts: list[Draft] = []
    choose = DDTreeSpeculator._choose_reach

    def chosen(self: Any, num_nodes: int | None, dummy_run: bool) -> Any:
        reach = choose(self, num_nodes, dummy_run)
        if num_nodes is not None and not dummy_run:
            verified = max(0, self.runtime.step.max_verify_len - 1)
            drafts.append(Draft(num_nodes, verified, reach.positions, reach.masks))
        return reach

    monkeypatch.setattr(DDTreeSpeculator, "_choose_reach", chosen)
    return drafts
