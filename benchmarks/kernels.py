# SPDX-License-Identifier: Apache-2.0
"""What a tree costs on top of a chain, kernel by kernel, in microseconds.

usage: python -m benchmarks.kernels --out FOLDER [--budgets 7 15 31 63 127] [--batches 1 8 32]

Each kernel is replayed from a CUDA graph of many calls, so launches from Python do not count.
Attention has one call for each layer's own cache, as in a forward pass. Sizes are those of
Qwen3-8B with a drafter of block size 16: 36 layers, 32/8 heads of 128, hidden size 4096, vocabulary
151936, bfloat16. Writes kernels.json and kernels.md. Columns:

top-k, build           candidates of the draft positions, growing the trees
rows                   tree positions, masks and lengths of the verify rows
sampling               vLLM's Gumbel draw at every row (a chain of these rows draws as much)
walk, context          longest accepted path; its rows for the drafter's context
compact, compact same  KV of the path to its place, all layers; path already in place
FA prefix              FlashAttention over the prefix, log-sum-exp included, all layers
tail                   attention among tree rows and merge, all layers
merge                  vLLM's merge of two attention parts, which the tail does in passing
FA causal              what a chain of the same rows runs instead of the two, all layers
Triton prefix          the prefix pass of the Triton backend, all layers
FlashInfer prefix      that of the FlashInfer backend, where FlashInfer is installed, all layers
tree work              top-k to compact without sampling, FA prefix and tail, less FA causal

The draft and verify forward are vLLM's own and the same for a chain of these rows. Alternatives
that are not used stand beside what is: Triton prefix, FlashInfer prefix, merge.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from vllm_ddtree.attention.kernels.prefix import prefix_attention
from vllm_ddtree.attention.kernels.tail import tail_attention
from vllm_ddtree.commit.kv import KVCompactor
from vllm_ddtree.proposer.candidates import Candidates, top_k_log_probs
from vllm_ddtree.proposer.context import ContextRows
from vllm_ddtree.round.emitted import Emitted
from vllm_ddtree.round.layout import Layout
from vllm_ddtree.round.meter import Meter
from vllm_ddtree.round.paths import Paths
from vllm_ddtree.round.rows import RowBuffers, prepare_rows
from vllm_ddtree.round.trees import TreeBuffers
from vllm_ddtree.sampler.walk import walk
from vllm_ddtree.tree.build import build_trees

COLUMNS = ["top-k", "build", "rows", "sampling", "walk", "context", "compact", "compact same"]
LAYERED = ["FA prefix", "tail", "FA causal", "Triton prefix", "merge", "FlashInfer prefix"]
COLUMNS += LAYERED  # a call is all layers
WORK = ["top-k", "build", "rows", "walk", "context", "compact", "FA prefix", "tail"]


@dataclass(frozen=True)
class Sizes:
    """The model and the point of time."""

    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    vocab: int = 151936
    states: int = 5
    depth: int = 15
    top_k: int = 16
    context: int = 1024
    kv_block: int = 16


Case = Callable[[], object]


def make_cases(
    sizes: Sizes,
    budget: int,
    batch: int,
    device: str,
    dtype: torch.dtype,
    flash: bool,
    flashinfer: bool = False,
) -> dict[str, Case]:
    """Each kernel as a call without arguments, over the trees of one random round.

    The cases must run in order at least once: trees, then rows, then the others.
    """
    s, num_rows, total = sizes, budget + 1, batch * (budget + 1)
    depth, top_k = min(s.depth, budget), min(s.top_k, budget)
    torch.manual_seed(0)

    def ints(values: list[int] | torch.Tensor, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(values, dtype=kind, device=device)

    # Draft: a few likely tokens a position, as drafters give.
    logits = torch.randn(batch * depth, s.vocab, device=device, dtype=dtype)
    peaks = torch.randint(s.vocab, (batch * depth, 4), device=device)
    heights = torch.tensor([14.0, 13.0, 12.0, 11.0], device=device, dtype=dtype)
    logits.scatter_(1, peaks, heights.expand(batch * depth, 4))
    log_probs = torch.empty(batch, depth, top_k, device=device)
    ids = torch.empty(batch, depth, top_k, device=device, dtype=torch.int64)
    scratch = Candidates(batch * depth, s.vocab, top_k, device)
    trees = TreeBuffers(batch, budget, device)
    rows = RowBuffers(total, batch, budget, torch.device(device))
    indices = torch.arange(batch, device=device)
    drafts = torch.zeros(batch, budget, dtype=torch.int64, device=device)

    # Verify batch: every request a full tree after `context` tokens.
    starts = ints([i * num_rows for i in range(batch + 1)])
    layout = Layout(indices, starts, starts)
    seq_lens = ints([s.context + num_rows] * batch)
    offsets = torch.arange(num_rows, device=device)
    linear = (s.context + offsets).repeat(batch)
    blocks = -(-(s.context + num_rows) // s.kv_block)
    table = torch.arange(batch * blocks, device=device, dtype=torch.int32).view(batch, blocks)
    slot_mapping = (
        table[:, linear[:num_rows] // s.kv_block].long() * s.kv_block
        + linear[:num_rows] % s.kv_block
    ).flatten()
    query = torch.randn(total, s.heads, s.head_dim, device=device, dtype=dtype)
    key = torch.randn(total, s.kv_heads, s.head_dim, device=device, dtype=dtype)
    value = torch.randn(total, s.kv_heads, s.head_dim, device=device, dtype=dtype)
    shape = (batch * blocks, s.kv_block, s.kv_heads, 2 * s.head_dim)
    caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(s.layers)]
    out = torch.zeros_like(query)
    lse = torch.empty(s.heads, total, device=device)
    wide = torch.empty(query.shape, device=device)
    prefix_lse = torch.zeros(s.heads, total, device=device)
    scale = s.head_dim**-0.5

    # Commit: the longest path of a tree, or the first rows.
    choices = torch.zeros(total, dtype=torch.int64, device=device)
    verified = torch.full((total,), -1, dtype=torch.int64, device=device)
    emitted = Emitted.empty(batch, depth, device)
    paths = Paths.empty(batch, depth, total, device)
    length = min(8, depth)  # of 7 accepted tokens: usual at budget 31 and more
    spread = torch.arange(length) * max(1, budget // max(1, length - 1))
    lengths = ints([length] * batch)
    moved = Paths(ints(spread.clamp(max=budget)).repeat(batch, 1), lengths, paths.gather_index)
    kept = Paths(ints(torch.arange(length)).repeat(batch, 1), lengths, paths.gather_index)
    tails = ints([num_rows] * batch)
    compactor = KVCompactor([cache.permute(0, 2, 1, 3) for cache in caches])
    num_rejected = tails - length
    states = [torch.randn(total, s.hidden, device=device, dtype=dtype) for _ in range(s.states)]

    meter = Meter(budget, torch.device(device))
    context = ContextRows(batch, depth + 1, torch.device(device))
    target_logits = torch.randn(total, s.vocab, device=device, dtype=dtype)
    row_indices = indices.repeat_interleave(num_rows)
    temperature = torch.ones(batch, device=device)
    seeds = torch.arange(batch, device=device)
    step: Any = SimpleNamespace(num_reqs=batch, query_start_loc=starts, positions=linear)
    merged_lse = torch.zeros(s.heads, total, device=device)

    def build() -> None:
        build_trees(log_probs, ids, indices, trees, drafts, depth, meter.built)

    def sample() -> None:
        gumbel_sample(
            target_logits,
            row_indices,
            temperature,
            seeds,
            rows.positions[:total],
            apply_temperature=True,
            is_drafting=False,
        )

    def merge() -> None:
        for _ in range(s.layers):
            merge_attn_states(out, query, merged_lse, query, merged_lse)

    def prepare() -> None:
        prepare_rows(
            trees,
            rows,
            paths,
            layout,
            seq_lens,
            linear,
            num_reqs_padded=batch,
            num_tokens_padded=total,
            max_query_len=num_rows,
        )

    def fill_rows() -> None:
        prepare()
        # What each row verifies: the walk compares it with the target's choices.
        verified.view(batch, num_rows)[:, 1:] = drafts

    def walk_down() -> None:
        walk(
            choices,
            verified,
            trees,
            layout,
            paths,
            emitted,
            meter.verified(trees, as_chains=False),
        )

    def tail() -> None:
        for _ in range(s.layers):
            tail_attention(
                query,
                key,
                value,
                rows.masks,
                starts,
                rows.tail_lens,
                out,
                prefix_lse,
                out,
                scale,
                num_rows,
            )

    def split(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cache[..., : s.head_dim], cache[..., s.head_dim :]

    def triton_prefix() -> None:
        for cache in caches:
            prefix_attention(
                query,
                *split(cache),
                table,
                starts,
                rows.tail_lens,
                rows.prefix_lens,
                wide,
                lse,
                scale,
                num_rows,
            )

    cases: dict[str, Case] = {
        "top-k": lambda: top_k_log_probs(
            logits, log_probs.flatten(0, 1), ids.flatten(0, 1), scratch
        ),
        "build": build,
        "rows": fill_rows,
    }
    for case in cases.values():
        case()
    # Not part of the rows' cost.
    cases["rows"] = prepare
    # At each row the target chooses a child's token, so that the walk goes to a leaf.
    parents = trees.parents.long().clamp(min=0)
    choices.view(batch, num_rows).scatter_(1, parents[:, 1:], drafts)
    cases |= {
        "walk": walk_down,
        "context": lambda: context.gather(paths, step, states, num_rejected),
        "sampling": sample,
        "merge": merge,
        "compact": lambda: compactor.compact(slot_mapping, starts, tails, moved, batch),
        "compact same": lambda: compactor.compact(slot_mapping, starts, tails, kept, batch),
        "tail": tail,
        "Triton prefix": triton_prefix,
    }
    if flash:
        cases |= flash_cases(sizes, query, caches, out, starts, seq_lens, rows, table, num_rows)
    if flashinfer:
        lens = rows.prefix_lens[:batch]
        cases |= flashinfer_cases(sizes, query, caches, out, lens, table, num_rows)
    return cases


def flash_cases(
    sizes: Sizes,
    query: torch.Tensor,
    caches: list[torch.Tensor],
    out: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: RowBuffers,
    table: torch.Tensor,
    num_rows: int,
) -> dict[str, Case]:
    """FlashAttention over prefixes and, causal, over everything, as in vLLM's FULL graphs."""
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        get_scheduler_metadata,
    )

    version = get_flash_attn_version(head_size=sizes.head_dim)
    num_splits = 32 if version == 3 else 0  # vLLM's flash_attn_max_num_splits_for_cuda_graph
    longest = sizes.context + num_rows

    def run(lengths: torch.Tensor, causal: bool) -> Case:
        plan = None
        if version == 3:
            plan = get_scheduler_metadata(
                batch_size=lengths.shape[0],
                max_seqlen_q=num_rows,
                max_seqlen_k=longest,
                num_heads_q=sizes.heads,
                num_heads_kv=sizes.kv_heads,
                headdim=sizes.head_dim,
                cache_seqlens=lengths,
                qkv_dtype=query.dtype,
                cu_seqlens_q=starts,
                page_size=sizes.kv_block,
                causal=causal,
                num_splits=num_splits,
            )

        def layers() -> None:
            for cache in caches:
                flash_attn_varlen_func(
                    q=query,
                    k=cache[..., : sizes.head_dim],
                    v=cache[..., sizes.head_dim :],
                    out=out,
                    cu_seqlens_q=starts,
                    max_seqlen_q=num_rows,
                    seqused_k=lengths,
                    max_seqlen_k=longest,
                    softmax_scale=sizes.head_dim**-0.5,
                    causal=causal,
                    block_table=table,
                    return_softmax_lse=not causal,
                    scheduler_metadata=plan,
                    fa_version=version,
                    num_splits=num_splits,
                )

        return layers

    prefix_lens = rows.prefix_lens[: seq_lens.shape[0]]
    return {"FA prefix": run(prefix_lens, False), "FA causal": run(seq_lens, True)}


def flashinfer_cases(
    sizes: Sizes,
    query: torch.Tensor,
    caches: list[torch.Tensor],
    out: torch.Tensor,
    lens: torch.Tensor,
    table: torch.Tensor,
    num_rows: int,
) -> dict[str, Case]:
    """FlashInfer's kernel over prefixes in segments, as in FULL graphs."""
    from vllm_ddtree.attention.backends.flashinfer_prefix import PrefixPlans

    builder = SimpleNamespace(
        num_qo_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        page_size=sizes.kv_block,
        sm_scale=sizes.head_dim**-0.5,
        logits_soft_cap=None,
        device=query.device,
        model_config=SimpleNamespace(dtype=query.dtype),
    )
    tree: Any = SimpleNamespace(prefix_lens=lens, in_graph=True)
    plan = PrefixPlans(builder, *table.shape).prepare(tree, num_rows, table)
    assert plan is not None

    def layers() -> None:
        for cache in caches:
            plan.run(query, cache[..., : sizes.head_dim], cache[..., sizes.head_dim :], out)

    return {"FlashInfer prefix": layers}


def microseconds(case: Case, calls: int, replays: int = 15) -> float:
    """Median time of one call, from replays of a CUDA graph of `calls` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            case()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            case()
    times = []
    for _ in range(replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return statistics.median(times[2:])


def table_of(results: list[dict[str, float]], layers: int) -> str:
    """Markdown table of the measurements, microseconds a round."""
    columns = [name for name in COLUMNS if name in results[0]]
    head = ["batch", "budget", *columns, "tree work", "tail a layer"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in results:
        work = sum(row.get(name, 0.0) for name in WORK) - row.get("FA causal", 0.0)
        cells = [f"{row['batch']:.0f}", f"{row['budget']:.0f}"]
        cells += [f"{row[name]:.1f}" for name in columns]
        cells += [f"{work:.0f}" if "FA causal" in row else "", f"{row['tail'] / layers:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", type=int, nargs="+", default=[7, 15, 31, 63, 127])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=Sizes.context)
    parser.add_argument("--top-k", type=int, default=Sizes.top_k)
    parser.add_argument("--no-flash", action="store_true", help="without FlashAttention's columns")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    import vllm

    sizes = Sizes(context=args.context, top_k=args.top_k)
    info = {
        "gpu": torch.cuda.get_device_name(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "sizes": asdict(sizes),
    }
    flashinfer = importlib.util.find_spec("flashinfer") is not None
    results: list[dict[str, float]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    for batch, budget in itertools.product(args.batches, args.budgets):
        cases = make_cases(
            sizes, budget, batch, "cuda", torch.bfloat16, not args.no_flash, flashinfer
        )
        row: dict[str, float] = {"batch": batch, "budget": budget}
        for name, case in cases.items():
            row[name] = microseconds(case, calls=2 if name in LAYERED else 20)
        del cases
        torch.cuda.empty_cache()
        results.append(row)
        print({name: round(value, 1) for name, value in row.items()}, flush=True)
        report = {"info": info, "microseconds": results}
        (args.out / "kernels.json").write_text(json.dumps(report, indent=1))
        text = f"{info['gpu']}, vLLM {info['vllm']}, PyTorch {info['torch']}\n\n"
        text += f"Microseconds a round, {sizes.layers} layers, context {sizes.context}.\n\n"
        (args.out / "kernels.md").write_text(text + table_of(results, sizes.layers) + "\n")
    print(table_of(results, sizes.layers))


if __name__ == "__main__":
    main()
