# SPDX-License-Identifier: Apache-2.0
"""What a round costs on this machine, measured at start.

After the CUDA graphs are captured, a dummy round of every captured shape is run and timed: target
forward, logits, draft, as vLLM's own `_dummy_run` does it (v1/worker/gpu/model_runner.py). All
ranks measure at the same time and in the same order, so that collectives meet.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

REPEATS = 5


@dataclass
class Costs:
    """Milliseconds a round; empty where vLLM captured no graphs."""

    rounds: dict[tuple[int, int], float] = field(default_factory=dict)
    """(rows a request, requests) -> target forward, logits, draft (no draft for one row)."""

    def round_ms(self, budget: int, num_reqs: int) -> float | None:
        """A round of `num_reqs` requests with `budget` nodes each; None if no graph serves it."""
        fitting = [n for rows, n in self.rounds if rows == budget + 1 and n >= num_reqs]
        return self.rounds[budget + 1, min(fitting)] if fitting else None


def _round(runner: Any, rows: int, num_reqs: int) -> None:
    """One dummy round: no request, no live cache block, no live tree."""
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {f"_ddtree_{i}": rows for i in range(num_reqs)}
    output.total_num_scheduled_tokens = rows * num_reqs
    runner.execute_model(output, dummy_run=True)
    state, runner.execute_model_state = runner.execute_model_state, None
    batch = state.input_batch
    runner.model.compute_logits(state.hidden_states[: rows * num_reqs])
    if rows == 1:
        return
    ones = torch.ones(batch.num_reqs, dtype=torch.int32, device=runner.device)
    runner.speculator.propose(
        input_batch=batch,
        attn_metadata=state.attn_metadata,
        slot_mappings=state.slot_mappings_by_layer,
        last_hidden_states=state.hidden_states,
        aux_hidden_states=state.aux_hidden_states,
        num_sampled=ones,
        num_rejected=torch.zeros_like(ones),
        last_sampled=runner.req_states.last_sampled_tokens,
        next_prefill_tokens=runner.req_states.next_prefill_tokens,
        temperature=runner.sampler.sampling_states.temperature.gpu,
        seeds=runner.sampler.sampling_states.seeds.gpu,
        dummy_run=True,
    )


@torch.inference_mode()
def measure(worker: Any) -> Costs:
    """Time a round of every shape that a worker has a FULL graph for. Before the first request."""
    runner = worker.model_runner
    costs = Costs()
    manager = runner.cudagraph_manager
    if manager is None or not torch.cuda.is_available():
        return costs
    shapes = {
        (desc.num_tokens // desc.num_reqs, desc.num_reqs)
        for desc in manager.graphs
        if desc.num_reqs and desc.num_tokens % desc.num_reqs == 0 and not desc.num_active_loras
    }
    for rows, num_reqs in sorted(shapes):
        _round(runner, rows, num_reqs)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        events[0].record()
        for i in range(REPEATS):
            _round(runner, rows, num_reqs)
            events[i + 1].record()
        torch.cuda.synchronize()
        times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
        costs.rounds[rows, num_reqs] = times[REPEATS // 2]
    # A dummy round names request slots; leave no tree in them.
    runner.model_state.runtime.trees.parents.fill_(-1)
    return costs
