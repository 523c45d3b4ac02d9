# SPDX-License-Identifier: Apache-2.0
"""Sends the soak's requests to an engine, aborts some of them and watches that answers come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.soak_requests import Request, Sample, faults, samples_of, sampling_params

T = TypeVar("T")


class Hang(RuntimeError):
    """Nothing came out of an engine for too long."""


@dataclass
class Outcome:
    """How a request ended: finished, aborted, refused or failed."""

    request: Request
    status: str
    samples: list[Sample] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    error: str = ""


class Driver:
    """Sends requests to an AsyncLLM and takes their answers.

    Args:
        engine: the AsyncLLM.
        max_model_len: tokens.
        eos: id of the end of text.
        stall: seconds without an answer that are a hang.

    """

    def __init__(self, engine: Any, max_model_len: int, eos: int, stall: float) -> None:
        self.engine, self.max_model_len, self.eos, self.stall = engine, max_model_len, eos, stall
        self.progress = time.monotonic()

    async def answer(self, request: Request, name: str, abort: bool = True) -> Outcome:
        """One request from beginning to end."""
        from vllm.exceptions import VLLMClientError

        try:
            task = asyncio.ensure_future(self._generate(request, name))
            output = await self._abort(task, request, name) if abort else await task
        except (VLLMClientError, ValueError, TypeError) as error:
            self.progress = time.monotonic()
            status = "refused" if request.wrong else "failed"
            return Outcome(request, status, error=f"{type(error).__name__}: {error}")
        except Exception as error:
            if self.engine.errored:
                raise
            return Outcome(request, "failed", error=f"{type(error).__name__}: {error!r}")
        if output is None or any(o.finish_reason == "abort" for o in output.outputs):
            status = "aborted" if abort and request.abort_after is not None else "failed"
            return Outcome(request, status, error="aborted")
        if request.wrong:
            return Outcome(request, "failed", error=f"{request.wrong}: not refused")
        found = faults(request, output, self.max_model_len, self.eos)
        return Outcome(request, "finished", samples_of(output), found)

    async def _generate(self, request: Request, name: str) -> Any:
        return await self.last_output(request.prompt, sampling_params(request), name)

    async def last_output(self, prompt: list[int], params: Any, name: str) -> Any:
        """The last of a request's outputs."""
        last = None
        async for output in self.engine.generate({"prompt_token_ids": prompt}, params, name):
            self.progress, last = time.monotonic(), output
        return last

    async def _abort(self, task: asyncio.Future[Any], request: Request, name: str) -> Any:
        """The task's output, None if the request's client went away."""
        if request.abort_after is not None:
            await asyncio.wait({task}, timeout=request.abort_after)
            if not task.done():
                if request.cancel:
                    task.cancel()
                    await asyncio.wait({task})
                    return None
                await self.engine.abort(name)
        return await task

    async def run(self, requests: Sequence[Request], concurrency: int) -> list[Outcome]:
        """All requests, `concurrency` in flight."""
        todo = iter(requests)

        async def client() -> list[Outcome]:
            return [await self.answer(request, request.name) for request in todo]

        clients = [client() for _ in range(concurrency)]
        return [outcome for part in await self.watch(asyncio.gather(*clients)) for outcome in part]

    async def again(
        self, outcomes: Sequence[Outcome], name: str, seconds: float
    ) -> list[tuple[Outcome, Outcome]]:
        """(first run, second run) of as many requests as there is time for, one at a time."""
        end, pairs = time.monotonic() + seconds, []
        for first in outcomes:
            if time.monotonic() > end:
                break
            request = first.request
            second = self.answer(request, f"{request.name}-{name}", abort=False)
            pairs.append((first, await self.watch(second)))
        return pairs

    async def watch(self, work: Awaitable[T]) -> T:
        """The result of `work`; raises Hang if answers stop coming."""
        task = asyncio.ensure_future(work)
        self.progress = time.monotonic()
        while not task.done():
            await asyncio.wait({task}, timeout=0.5)
            if not task.done() and time.monotonic() - self.progress > self.stall:
                task.cancel()
                raise Hang(f"no answer for {self.stall} s")
        return task.result()

    async def all_free(self) -> bool:
        """Whether the engine's KV blocks are all free: only then its prefix cache can be reset."""
        for _ in range(20):
            if await self.engine.reset_prefix_cache():
                return True
            await asyncio.sleep(0.1)  # the last abort may be under way
        return False

    async def memory(self) -> dict[str, float]:
        """MiB of the worker's process (benchmarks/soak_worker.py)."""
        return (await self.engine.collective_rpc("soak_memory"))[0]
