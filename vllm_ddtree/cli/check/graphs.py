# SPDX-License-Identifier: Apache-2.0
"""Which rounds of a pair get CUDA graphs, and what memory they take, by configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ddtree.cli.check.findings import Finding, State
from vllm_ddtree.cli.check.no_gpu import without_gpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MIB = 2**20


def reach(sizes: Sequence[int], budgets: Iterable[int], limit: int) -> dict[int, int]:
    """Most requests that have a graph, by budget.

    vLLM rounds each size up to whole requests, and leaves out what is then above the largest
    (v1/worker/gpu/cudagraph_utils.py, `_init_candidates`).

    Args:
        sizes: of the verify step, tokens.
        budgets: in nodes.
        limit: most requests that may run.

    """
    found = {}
    for nodes in budgets:
        rows = nodes + 1
        counts = [-(-size // rows) for size in sizes if -(-size // rows) * rows <= max(sizes)]
        found[nodes] = max((count for count in counts if count <= limit), default=0)
    return found


def graphs(vllm_config: VllmConfig) -> Iterator[Finding]:
    """The plan, and the memory that is known of it."""
    from vllm_ddtree.budget.tiers import TIERS
    from vllm_ddtree.config.graphs import plan_sizes

    spec: Any = vllm_config.speculative_config
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    sizes, words = list(vllm_config.compilation_config.cudagraph_capture_sizes or []), ""
    if not sizes and not model.enforce_eager and without_gpu():
        sizes, words = plan_sizes(vllm_config), "on a GPU: "
    if not sizes:
        text = "none: every kernel is launched by itself, and auto has nothing to measure"
        yield Finding("graphs", State.WARNING, text, "leave --enforce-eager out, on a GPU")
        return
    limit = scheduler.max_num_seqs
    schedule = spec.num_speculative_tokens_per_batch_size or [(1, limit, spec.budget)]
    budgets = TIERS if spec.auto_budget else sorted({nodes for _, _, nodes in schedule})
    most = reach(sizes, budgets, limit)
    listed = ", ".join(f"{nodes} nodes up to {count}" for nodes, count in most.items() if count)
    yield Finding(
        "graphs",
        State.GOOD,
        f"{words}{len(sizes)} sizes of the verify step, up to {max(sizes)} tokens; requests with a "
        f"graph: {listed} (of --max-num-seqs={limit})",
    )
    none = [nodes for nodes, count in most.items() if not count]
    if none:
        yield Finding(
            "graphs",
            State.WARNING,
            f"no graph for budgets of {', '.join(map(str, none))} nodes",
            "raise --max-num-batched-tokens, or leave out your own capture sizes",
        )
    yield memory(vllm_config, sizes)


def memory(vllm_config: VllmConfig, sizes: list[int]) -> Finding:
    """What lies in the graphs' pool for sure, and the buffers that follow the largest budget."""
    from vllm_ddtree.config.pair import draft_vocab_size
    from vllm_ddtree.graphs.sizes import draft_sizes

    spec: Any = vllm_config.speculative_config
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    drafts = draft_sizes(
        spec.block_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, sizes
    )
    vocabulary = draft_vocab_size(spec.draft_model_config.hf_config)
    logits = max(drafts, default=0) * vocabulary * model.dtype.itemsize
    masks = scheduler.max_num_seqs * (spec.budget + 1) * model.get_vocab_size() // 8
    return Finding(
        "graph memory",
        State.NOTE,
        f"an estimate: at least {logits / MIB:.0f} MiB for the logits of the largest draft on all "
        f"GPUs together, beside activations; {masks / MIB:.0f} MiB for masks of structured output. "
        "vLLM measures the rest at start, within --gpu-memory-utilization",
    )
