# SPDX-License-Identifier: Apache-2.0
"""What latent (MLA) tree attention costs, in microseconds, layer by layer of a target.

usage: python -m benchmarks.latent [--heads 8] [--budgets 7 15 31 63] [--batches 1 8 32]
           [--contexts 1024 16384] [--layers 8]

One line a case: DDTree's two passes with tiles of 16, 32 and 64 (row, head) pairs, and vLLM's
TRITON_MLA decode kernel over the same rows as a chain. Each is replayed from a CUDA graph of one
call a layer, each layer with its own cache (latents of 512 + 64, bfloat16); the figure is one
layer's. `*` marks the tile that is chosen by itself. Needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from vllm.triton_utils import triton
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

from vllm_ddtree.attention import latent
from vllm_ddtree.attention.latent import Tail, latent_attention
from vllm_ddtree.attention.latent_prefix import tile_rows

RANK, ROPE, KV_BLOCK = 512, 64, 64
TILES = (16, 32, 64)


def microseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a graph that holds `call`."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def measure(heads: int, budget: int, batch: int, context: int, layers: int) -> dict[str, float]:
    """Microseconds a layer, by form."""
    rows, total = budget + 1, batch * (budget + 1)
    blocks = -(-(context + rows) // KV_BLOCK)
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    place = context + torch.arange(rows)
    slots = (table[:, place // KV_BLOCK].long() * KV_BLOCK + place % KV_BLOCK).flatten()
    caches = [
        torch.randn(batch * blocks, KV_BLOCK, RANK + ROPE, dtype=torch.bfloat16)
        for _ in range(layers)
    ]
    query = torch.randn(total, heads, RANK + ROPE, dtype=torch.bfloat16)
    parts = [part.contiguous() for part in query.split([RANK, ROPE], dim=-1)]
    out = torch.zeros(total, heads, RANK, dtype=torch.bfloat16)
    scale = 192**-0.5
    # Every row is the root's child: the mask's content costs nothing.
    masks = torch.zeros(total, (rows + 31) // 32, dtype=torch.int32)
    masks[:, 0] = 1
    tail = Tail(
        torch.arange(1, batch + 1, dtype=torch.int32) * rows,
        torch.full((batch,), rows, dtype=torch.int32),
        torch.full((batch,), context, dtype=torch.int32),
        rows,
        masks,
    )

    def ours() -> None:
        for cache in caches:
            latent_attention(*parts, cache, table, slots, tail, out, scale)

    # As vLLM's TritonMLAImpl chooses.
    splits = triton.next_power_of_2(max(1, (context + rows) // 512))
    splits = min(splits, 2 * latent.num_sms(out.device))
    logits = torch.empty(total, heads, splits, RANK + 1, dtype=torch.float32)
    lse = torch.empty(total, heads, dtype=torch.bfloat16)
    lens = (context + 1 + torch.arange(rows, dtype=torch.int32)).repeat(batch)
    row_table = table.repeat_interleave(rows, dim=0)
    one = torch.ones(1)

    def chain() -> None:
        for cache in caches:
            keys = cache.unsqueeze(2)
            decode_attention_fwd(
                query,
                keys,
                keys[..., :RANK],
                out,
                lse,
                row_table,
                lens,
                logits,
                splits,
                scale,
                KV_BLOCK,
                k_scale=one,
                v_scale=one,
                is_mla=True,
            )

    figures: dict[str, float] = {}
    chosen = tile_rows(rows * heads, 2 * (RANK + ROPE), out.device)
    for tile in TILES:
        with mock.patch.object(latent, "tile_rows", lambda *_, tile=tile: tile):
            name = f"tile {tile}{'*' if tile == chosen else ''}"
            try:
                figures[name] = microseconds(ours) / layers
            except Exception as error:  # more shared memory than there is
                print(f"{name}: {error}")
    figures["vLLM chain"] = microseconds(chain) / layers
    return figures


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latent", description=__doc__)
    whole: dict[str, Any] = {"type": int, "nargs": "+"}
    parser.add_argument("--heads", type=int, default=8, help="query heads of one GPU")
    parser.add_argument("--budgets", default=[7, 15, 31, 63], **whole)
    parser.add_argument("--batches", default=[1, 8, 32], **whole)
    parser.add_argument("--contexts", default=[1024, 16384], **whole)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args(argv)
    with torch.device("cuda"):
        for context, batch, budget in itertools.product(args.contexts, args.batches, args.budgets):
            figures = measure(args.heads, budget, batch, context, args.layers)
            line = ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
            print(f"context {context}, {batch} requests, budget {budget}: {line}", flush=True)


if __name__ == "__main__":
    main()
