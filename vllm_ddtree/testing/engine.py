# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine in this process: what it generated, what its speculation counted."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

Prompt: TypeAlias = "str | Sequence[int] | dict[str, Any]"


@dataclass(frozen=True)
class Counters:
    """vLLM's `spec_decode` counters, from the engine's start or between two readings."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    per_position: tuple[int, ...] = ()

    @classmethod
    def read(cls, llm: LLM) -> Counters:
        """The counters of `llm` since it was made, all zero without speculation."""
        values: dict[str, Any] = {}
        for metric in llm.get_metrics():
            name = metric.name.removeprefix("vllm:spec_decode_")
            if name == "num_accepted_tokens_per_pos":
                values["per_position"] = tuple(metric.values)
            elif name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                values[name] = int(metric.value)
        return cls(**values)

    def since(self, before: Counters) -> Counters:
        """Counts of this reading less those of an earlier one of the same engine."""
        earlier = before.per_position or (0,) * len(self.per_position)
        return Counters(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            tuple(now - then for now, then in zip(self.per_position, earlier, strict=True)),
        )

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round: accepted + 1 (the bonus token). 1.0 when nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(frozen=True)
class Result:
    """What one call of `run_engine` gave; lists are in the order of the prompts (of the samples,
    for n > 1).
    """

    token_ids: list[list[int]]
    texts: list[str]
    counters: Counters
    seconds: float  # generation alone, without the engine's start
    outputs: list[RequestOutput] = field(repr=False)  # vLLM's own, for logprobs and finish reasons


@contextmanager
def open_engine(
    target: str | Path, spec: dict[str, Any] | None = None, **llm_kwargs: Any
) -> Iterator[LLM]:
    """A vLLM engine in this process, shut down on leaving so that the next one finds nothing of it.

    `spec` is the speculative_config (a copy goes to vLLM, which changes it), `llm_kwargs` are those
    of `vllm.LLM`. Needs VLLM_ENABLE_V1_MULTIPROCESSING=0.
    """
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = None
    try:
        config = None if spec is None else dict(spec)
        llm = LLM(model=str(target), speculative_config=config, **llm_kwargs)
        yield llm
    finally:
        # Also after a failed start: a process group left behind would fail the next engine.
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def generate(
    llm: LLM,
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    on_tokens: Callable[[int], object] | None = None,
    on_output: Callable[[RequestOutput], object] | None = None,
) -> Result:
    """Completes all prompts at once, with one SamplingParams or one a prompt.

    A prompt is text, token ids, or vLLM's own dict (with images, say).

    `on_tokens` is called with the number of new tokens after every step of the engine; the engine
    must then run in this process and every request have one sample. `on_output` is called with
    every output of a step; the request's id is the prompt's place. Prefix caching, if on, sees what
    earlier calls left.
    """
    inputs = [p if isinstance(p, (str, dict)) else {"prompt_token_ids": [*p]} for p in prompts]
    before, start = Counters.read(llm), time.perf_counter()
    if on_tokens is None and on_output is None:
        params = (
            sampling_params if not isinstance(sampling_params, Sequence) else [*sampling_params]
        )
        outputs = llm.generate(inputs, params, use_tqdm=False)
    else:
        outputs = _step_through(llm, inputs, sampling_params, on_tokens, on_output)
    seconds = time.perf_counter() - start
    samples = [sample for output in outputs for sample in output.outputs]
    return Result(
        token_ids=[list(sample.token_ids) for sample in samples],
        texts=[sample.text for sample in samples],
        counters=Counters.read(llm).since(before),
        seconds=seconds,
        outputs=outputs,
    )


def _step_through(
    llm: LLM,
    inputs: Sequence[Any],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    on_tokens: Callable[[int], object] | None,
    on_output: Callable[[RequestOutput], object] | None,
) -> list[RequestOutput]:
    """What `LLM.generate` does, one engine step at a time."""
    engine = llm.llm_engine
    many = isinstance(sampling_params, Sequence)
    for index, prompt in enumerate(inputs):
        engine.add_request(str(index), prompt, sampling_params[index] if many else sampling_params)
    latest: dict[str, RequestOutput] = {}
    seen: dict[str, int] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            latest[output.request_id] = output
            count = len(output.outputs[0].token_ids)
            if on_tokens is not None:
                on_tokens(count - seen.get(output.request_id, 0))
            if on_output is not None:
                on_output(output)
            seen[output.request_id] = count
    return [latest[str(index)] for index in range(len(inputs))]


def run_engine(
    target: str | Path,
    spec: dict[str, Any] | None,
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    on_tokens: Callable[[int], object] | None = None,
    on_output: Callable[[RequestOutput], object] | None = None,
    **llm_kwargs: Any,
) -> Result:
    """`open_engine`, one `generate`, shut down."""
    with open_engine(target, spec, **llm_kwargs) as llm:
        return generate(llm, prompts, sampling_params, on_tokens, on_output)
