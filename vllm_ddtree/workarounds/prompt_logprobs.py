# SPDX-License-Identifier: Apache-2.0
"""Prompt logprobs without those of draft rows.

vLLM, v1/core/sched/scheduler.py, `Scheduler.schedule` ("Pad new decode requests"): a new request
with one token left to compute gets as many rows as the running requests have. vLLM's worker
(v1/worker/gpu/sample/prompt_logprob.py) takes all of these rows for the prompt's and returns
logprobs for them.

It can go when the worker leaves out rows beyond the prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


def drop_padded(scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> None:
    """Drop what a step has computed for new requests with draft rows.

    Only the last token of such a prompt was computed, and no token of the prompt follows it.
    """
    if found := model_runner_output.prompt_logprobs_dict:
        for request in scheduler_output.scheduled_new_reqs:
            if request.req_id in scheduler_output.scheduled_spec_decode_tokens:
                found.pop(request.req_id, None)
