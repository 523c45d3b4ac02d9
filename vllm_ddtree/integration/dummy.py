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
def random_tokens(runner: Any) -> Iterator[None]:
    """Dummy steps with random tokens: equal rows would draw less power than real ones."""
    manager, buffers = runner.cudagraph_manager, runner.input_buffers
    replay = manager.run_fullgraph
    vocab = runner.model_config.get_vocab_size()
    generator = torch.Generator(runner.device).manual_seed(0)  # the same on all ranks

    def run_fullgraph(desc: Any, *args: Any, **kwargs: Any) -> Any:
        buffers.input_ids[: desc.num_tokens].random_(0, vocab, generator=generator)
        return replay(desc, *args, **kwargs)

    manager.run_fullgraph = run_fullgraph
    try:
        yield
    finally:
        del manager.run_fullgraph
