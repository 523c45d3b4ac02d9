# SPDX-License-Identifier: Apache-2.0
"""The meter is read from several ranks without waiting for any.

vLLM's MultiprocExecutor answers in order: taking the answer of one call waits for those of all
calls before it. With asynchronous scheduling a step is under way whenever the scheduler looks at
the one before; an answer that is taken early would wait for it and stall the pipeline.
"""

from __future__ import annotations

import pickle
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from tests.budget.test_acceptance import Rounds
from tests.budget.test_auto import machine, output
from vllm_ddtree.budget import auto
from vllm_ddtree.budget.auto import READ_EVERY, AutoBudget, Watch

RANKS = 2


class Ranks(MultiprocExecutor):
    """vLLM's executor over two workers in this process.

    A worker has come exactly as far as somebody has waited for; while `watching`, nobody may.
    """

    def __init__(self, counts: list[list[int]]) -> None:
        self.is_failed = False
        self.rpc_broadcast_mq: Any = self
        self.response_mqs: Any = [SimpleNamespace(dequeue=self._reader(i)) for i in range(RANKS)]
        self.futures_queue: Any = deque()
        self.watching = False
        self.reads = 0
        self._counts = counts
        self._answers: list[deque[tuple[int, Any]]] = [deque() for _ in range(RANKS)]
        self._calls = self._come = 0

    def enqueue(self, message: tuple[Any, tuple[Any, ...], dict[str, Any], int | None]) -> None:
        """A call for the workers; what a rank answers lies in its queue."""
        method, _, _, output_rank = message
        self._calls += 1
        for rank in range(RANKS) if output_rank is None else [output_rank]:
            answer: Any = method
            if not isinstance(method, str):
                meter = SimpleNamespace(read=lambda: self._counts)
                state = SimpleNamespace(runtime=SimpleNamespace(meter=meter))
                runner = SimpleNamespace(model_state=state)
                answer = pickle.loads(method)(SimpleNamespace(model_runner=runner))
                self.reads += 1
            self._answers[rank].append((self._calls, answer))

    def _reader(self, rank: int) -> Any:
        def dequeue(timeout: float | None) -> tuple[Any, Any]:
            call, answer = self._answers[rank].popleft()
            assert call <= self._come or not self.watching, "waited for a worker"
            self._come = max(self._come, call)
            return WorkerProc.ResponseStatus.SUCCESS, answer

        return dequeue

    def call(self, method: str) -> Any:
        """A step's call, answered by the first rank."""
        return self.collective_rpc(method, non_block=True, unique_reply_rank=0)


def serve(executor: Ranks, watch: Watch, steps: int, in_flight: int) -> None:
    """The engine's loop: `in_flight` steps are with the workers when one's output is looked at."""
    queue: deque[Any] = deque()
    for step in range(steps):
        while len(queue) < in_flight:
            executor.call("execute_model")
            queue.append(executor.call("sample_tokens"))
        assert queue.popleft().result() == "sample_tokens"
        executor.watching = True
        watch.step(output({"a": 16}, 15), 1.0 + 0.006 * step)
        executor.watching = False


def make() -> tuple[Ranks, Watch]:
    flat = [1.0] * 64
    executor = Ranks(Rounds(64, flat, flat).verify(63, 3000))
    return executor, Watch(AutoBudget(machine(knee=160), max_num_seqs=8), executor)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_no_step_is_waited_for(in_flight: int) -> None:
    executor, watch = make()
    before = watch.auto.acceptance.expected(31)
    serve(executor, watch, 3 * READ_EVERY, in_flight)
    assert executor.reads == 3 * RANKS
    assert watch.auto.acceptance.expected(31) > before


def test_an_answer_taken_at_once_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "READ_AFTER", 1)
    executor, watch = make()
    with pytest.raises(AssertionError, match="waited for a worker"):
        serve(executor, watch, READ_EVERY + 2, in_flight=2)


def test_other_calls_take_their_own_answers() -> None:
    """A call that waits, in between: it is not given the meter's counts, nor they lost."""
    executor, watch = make()
    serve(executor, watch, READ_EVERY, in_flight=1)
    before = watch.auto.acceptance.expected(31)
    assert executor.collective_rpc("reset_prefix_cache") == ["reset_prefix_cache"] * RANKS
    serve(executor, watch, READ_EVERY, in_flight=1)
    assert watch.auto.acceptance.expected(31) > before
