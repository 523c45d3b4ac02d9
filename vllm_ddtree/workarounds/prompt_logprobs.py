# SPDX-License-Identifier: Apache-2.0
"""No prompt logprobs for rows that are no prompt's.

vLLM's scheduler gives a new request with one token left to compute as many rows as the running
ones have ("Pad new decode requests", v1/core/sched/scheduler.py), and its worker takes all of them
for the prompt's (v1/worker/gpu/sample/prompt_logprob.py).
"""

from typing import Any


def drop_padded(scheduler_output: Any, model_runner_output: Any) -> None:
    """Drop what a step has computed for new requests with draft rows.

    Of such a prompt only the last token was computed, which no token of the prompt follows.
    """
    if found := model_runner_output.prompt_logprobs_dict:
        for request in scheduler_output.scheduled_new_reqs:
            if request.req_id in scheduler_output.scheduled_spec_decode_tokens:
                found.pop(request.req_id, None)
