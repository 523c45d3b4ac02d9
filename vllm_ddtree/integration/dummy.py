# SPDX-License-Identifier: Apache-2.0
"""Dummy rounds of a runner: no request, no live cache block.

As vLLM's own `_dummy_run` does it (v1/worker/gpu/model_runner.py).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch


def dummy_step(
    runner: Any, num_reqs: int, rows: int, before: Callable[[Any], None]
) -> tuple[Any, torch.Tensor]:
    """Target forward and logits.

    Args:
        runner: a GPUModelRunner.
        num_reqs: requests.
        rows: of each.
        before: (SchedulerOutput) -> None.

    Returns:
        What `dummy_draft` goes on from, and the logits.

    """
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {f"_ddtree_{i}": rows for i in range(num_reqs)}
    output.total_num_scheduled_tokens = rows * num_reqs
    before(output)
    with _adapters_chosen(runner, np.full(num_reqs, rows, dtype=np.int32)):
        runner.execute_model(output, dummy_run=True)
        state, runner.execute_model_state = runner.execute_model_state, None
        return state, runner.model.compute_logits(state.hidden_states[: rows * num_reqs])


def _adapters_chosen(runner: Any, rows: np.ndarray) -> AbstractContextManager[None]:
    """Within, the requests of a dummy step have adapters, as many different ones as can be active.

    Args:
        runner: a GPUModelRunner, its `dummy_adapters` there.
        rows: int32 [num_reqs], of each request; all are sampled.

    """
    config = runner.lora_config
    return runner.maybe_select_dummy_loras(
        config,
        rows,
        num_sampled_tokens=rows,
        num_active_loras=config.max_loras if config else 0,
    )


def dummy_adapters(runner: Any) -> AbstractContextManager[None]:
    """Within, a runner with LoRA has adapters for its dummy steps; afterwards none.

    Dummy steps replay the graphs of the most active adapters (vLLM's
    `get_num_active_loras_for_dispatch`).
    """
    return runner.maybe_setup_dummy_loras(runner.lora_config)


def dummy_draft(runner: Any, state: Any, num_rejected: int, num_drafts: int) -> None:
    """The draft after a dummy step in which every request accepted nothing.

    Args:
        runner: a GPUModelRunner.
        state: of the step.
        num_rejected: tokens of each request.
        num_drafts: tokens of each request to draft.

    """
    batch = state.input_batch
    ones = torch.ones(batch.num_reqs, dtype=torch.int32, device=runner.device)
    runner.speculator.propose(
        input_batch=batch,
        attn_metadata=state.attn_metadata,
        slot_mappings=state.slot_mappings_by_layer,
        last_hidden_states=state.hidden_states,
        aux_hidden_states=state.aux_hidden_states,
        num_sampled=ones,
        num_rejected=ones * num_rejected,
        last_sampled=runner.req_states.last_sampled_tokens,
        next_prefill_tokens=runner.req_states.next_prefill_tokens,
        temperature=runner.sampler.sampling_states.temperature.gpu,
        seeds=runner.sampler.sampling_states.seeds.gpu,
        dummy_run=True,
        num_speculative_tokens=num_drafts,
    )


@contextmanager
def like_text(runner: Any) -> Iterator[None]:
    """Within, dummy steps cost the target what steps of text would.

    vLLM's dummy rows hold token 0 and are padding, which wakes no expert of a mixture, or the same
    few. Here they hold tokens of the whole vocabulary and count as rows of requests. Equal rows
    would also draw less power.

    The drafter's rows are left alone: all but one of a block are masks in any case.
    """
    state = runner.model_state
    prepare_inputs = state.prepare_inputs
    vocab = runner.model_config.get_vocab_size()
    generator = torch.Generator(runner.device).manual_seed(0)  # the same on all ranks

    def prepare(batch: Any, req_states: Any) -> Any:
        # Persistent buffers, which a graph's replay reads, too.
        batch.input_ids.random_(0, vocab, generator=generator)
        batch.is_padding.fill_(False)
        if runner.uses_inputs_embeds:
            embeds = state.dummy_inputs_embeds(batch.num_tokens_after_padding)
            embeds.copy_(runner.model.embed_input_ids(batch.input_ids))
        return prepare_inputs(batch, req_states)

    state.prepare_inputs = prepare
    try:
        yield
    finally:
        del state.prepare_inputs
