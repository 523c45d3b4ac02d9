# SPDX-License-Identifier: Apache-2.0
"""Ending a request with an error, in the scheduler."""

from collections.abc import Collection
from typing import Any


def model_runner_output(output: Any) -> Any:
    """The `ModelRunnerOutput` of a step's output, which may still be on its way to the host."""
    return getattr(output, "model_runner_output", output)


def stop_with_error(scheduler: Any, req_ids: Collection[str]) -> list[Any]:
    """Finish requests with an error; their blocks are freed and forgotten by the prefix cache.

    Returns:
        The requests that were not finished yet.

    """
    from vllm.v1.request import RequestStatus

    if not req_ids:
        return []
    manager = scheduler.kv_cache_manager
    there = [req_id for req_id in req_ids if req_id in scheduler.requests]
    blocks = {block for req_id in there for ids in manager.get_block_ids(req_id) for block in ids}
    stopped: list[Any] = scheduler.finish_requests(there, RequestStatus.FINISHED_ERROR)
    manager.evict_blocks(blocks)
    return stopped


def add_error_output(outputs: dict[int, Any], request: Any, message: str) -> None:
    """Tell a stopped request's client, whose outputs are `outputs[request.client_index]`."""
    from vllm.outputs import RequestError
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    output = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=message,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
    if hasattr(output, "error"):  # vLLM 0.33
        output.error = RequestError(code="ddtree_invariant", message=message)
    client = outputs.setdefault(request.client_index, EngineCoreOutputs())
    client.outputs = [*client.outputs, output]
