# SPDX-License-Identifier: Apache-2.0
"""What latent (MLA) tree attention costs, in microseconds a layer, by backend and tile.

usage: python -m benchmarks.latent [--heads 8] [--budgets 7 31 63] [--batches 1 8 32]
           [--contexts 1024 16384] [--layers 4] [--repeats 10]

Prints a table, one line a case:

prefix   the pass over the committed keys: by FlashAttention 3, by FlashMLA, and by our kernel with
         tiles of 16, 32 and 64 (row, head) pairs
tail     our kernel over the tree's own rows, by tile; it also merges one prefix part
chain    vLLM's own kernels over as many rows, each seeing the rows before it

Each is replayed from a CUDA graph of one call a layer, each layer with its own cache (latents of
512 + 64, blocks of 64, bfloat16). `*` marks the tile that is used. `-` marks what does not run
here; the reason stands below the table. Needs a GPU. The default cases are meant to take less than
a minute on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.triton_utils import triton
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

from vllm_ddtree.attention.forward import triton_prefix
from vllm_ddtree.attention.forward.triton_prefix import triton_latent_prefix_pass
from vllm_ddtree.attention.kernels import latent_tail
from vllm_ddtree.attention.kernels.latent_prefix import tile_rows
from vllm_ddtree.attention.kernels.launch import num_sms
from vllm_ddtree.attention.metadata.latent import Tail

RANK, ROPE, KV_BLOCK = 512, 64, 64
TILES = (16, 32, 64)
SCALE = 192**-0.5
COLUMNS = (
    "prefix FLASH_ATTN_MLA",
    "prefix FLASHMLA",
    *(f"prefix tile {tile}" for tile in TILES),
    *(f"tail tile {tile}" for tile in TILES),
    "chain FLASH_ATTN_MLA",
    "chain TRITON_MLA",
)


def microseconds(call: Callable[[], object], repeats: int) -> float:
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


class Case:
    """A verify batch of `batch` trees of `budget` nodes behind `context` keys each."""

    def __init__(self, heads: int, budget: int, batch: int, context: int, layers: int) -> None:
        self.heads, self.batch, self.rows, self.context = heads, batch, budget + 1, context
        self.total = batch * self.rows
        blocks = -(-(context + self.rows) // KV_BLOCK)
        self.table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
        place = context + torch.arange(self.rows)
        slots = self.table[:, place // KV_BLOCK].long() * KV_BLOCK + place % KV_BLOCK
        self.slots = slots.flatten()
        self.caches = [
            torch.randn(batch * blocks, KV_BLOCK, RANK + ROPE, dtype=torch.bfloat16)
            for _ in range(layers)
        ]
        self.query = torch.randn(self.total, heads, RANK + ROPE, dtype=torch.bfloat16)
        latent_part, rope_part = self.query.split([RANK, ROPE], dim=-1)
        self.parts = latent_part.contiguous(), rope_part.contiguous()
        self.out = torch.zeros(self.total, heads, RANK, dtype=torch.bfloat16)
        self.starts = torch.arange(batch + 1, dtype=torch.int32) * self.rows
        # Every row is the root's child: the mask's content costs nothing.
        masks = torch.zeros(self.total, (self.rows + 31) // 32, dtype=torch.int32)
        masks[:, 0] = 1
        self.tail = Tail(
            self.starts[1:],
            torch.full((batch,), self.rows, dtype=torch.int32),
            torch.full((batch,), context, dtype=torch.int32),
            self.rows,
            masks,
        )

    def chosen_tile(self) -> int:
        return tile_rows(self.rows * self.heads, 2 * (RANK + ROPE), self.out.device)

    def triton_prefix(self, tile: int) -> Callable[[], object]:
        def call() -> None:
            with mock.patch.object(triton_prefix, "tile_rows", lambda *_: tile):
                for cache in self.caches:
                    triton_latent_prefix_pass(*self.parts, cache, self.table, self.tail, SCALE)

        return call

    def triton_tail(self, tile: int) -> Callable[[], object]:
        prefix_out = torch.zeros(1, *self.out.shape)  # float32, as our own prefix kernel gives it
        prefix_lse = torch.zeros(1, self.heads, self.total)

        def call() -> None:
            with mock.patch.object(latent_tail, "TILE_ROWS", tile):
                for cache in self.caches:
                    latent_tail.latent_tail(
                        *self.parts,
                        cache,
                        self.slots,
                        self.tail.masks,
                        self.tail.ends,
                        self.tail.lens,
                        prefix_out,
                        prefix_lse,
                        self.out,
                        SCALE,
                        self.batch,
                        self.rows,
                    )

        return call

    def _decode(self, **more: Any) -> Any:
        """The decodes' metadata as the builders make them."""
        return SimpleNamespace(
            block_table=self.table,
            query_start_loc=self.starts,
            max_query_len=self.rows,
            max_seq_len=self.context + self.rows,
            **more,
        )

    def flash_attention(self, causal: bool) -> Callable[[], object]:
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_scheduler_metadata,
        )

        from vllm_ddtree.attention.backends.flash_attn_mla import (
            TreeFlashAttnMLAImpl,
            prefix_splits,
        )

        lens = self.tail.prefix_lens + self.rows * causal
        splits = 32 if causal else prefix_splits(self.total * self.heads, 32)
        plan = get_scheduler_metadata(
            batch_size=self.batch,
            max_seqlen_q=self.rows,
            max_seqlen_k=self.context + self.rows,
            num_heads_q=self.heads,
            num_heads_kv=1,
            headdim=ROPE,
            cache_seqlens=lens,
            qkv_dtype=torch.bfloat16,
            headdim_v=RANK,
            page_size=KV_BLOCK,
            cu_seqlens_q=self.starts,
            causal=causal,
            num_splits=splits,
        )
        decode = self._decode(scheduler_metadata=plan, max_num_splits=splits)
        metadata = SimpleNamespace(decode=decode, tails=[self.tail])
        impl: Any = TreeFlashAttnMLAImpl.__new__(TreeFlashAttnMLAImpl)
        impl.kv_lora_rank, impl.scale = RANK, SCALE

        def prefix() -> None:
            for cache in self.caches:
                impl.prefix_pass(*self.parts, cache, metadata, self.tail, self.out)

        def chain() -> None:
            # As vLLM's FlashAttnMLAImpl calls it.
            for cache in self.caches:
                flash_attn_varlen_func(
                    q=self.parts[1],
                    k=cache[..., RANK:].unsqueeze(-2),
                    v=cache[..., :RANK].unsqueeze(-2),
                    q_v=self.parts[0],
                    max_seqlen_q=self.rows,
                    cu_seqlens_q=self.starts,
                    max_seqlen_k=self.context + self.rows,
                    seqused_k=lens,
                    block_table=self.table,
                    softmax_scale=SCALE,
                    causal=True,
                    fa_version=3,
                    scheduler_metadata=plan,
                    num_splits=splits,
                )

        return chain if causal else prefix

    def flashmla_prefix(self) -> Callable[[], object]:
        from vllm.v1.attention.ops.flashmla import get_mla_metadata

        from vllm_ddtree.attention.backends.flashmla import TreeFlashMLAImpl

        impl: Any = TreeFlashMLAImpl.__new__(TreeFlashMLAImpl)
        impl.kv_lora_rank, impl.scale = RANK, SCALE

        def call() -> None:
            decode = self._decode(scheduler_metadata=get_mla_metadata()[0])
            metadata = SimpleNamespace(decode=decode, uniform_len=self.rows)
            for cache in self.caches:
                impl.prefix_pass(*self.parts, cache, metadata, self.tail, self.out)

        return call

    def triton_chain(self) -> Callable[[], object]:
        # As vLLM's TritonMLAImpl chooses.
        splits = triton.next_power_of_2(max(1, (self.context + self.rows) // 512))
        splits = min(splits, 2 * num_sms(self.out.device))
        logits = torch.empty(self.total, self.heads, splits, RANK + 1, dtype=torch.float32)
        lse = torch.empty(self.total, self.heads, dtype=torch.bfloat16)
        lens = self.context + 1 + torch.arange(self.rows, dtype=torch.int32)
        lens = lens.repeat(self.batch)
        row_table = self.table.repeat_interleave(self.rows, dim=0)
        one = torch.ones(1)

        def call() -> None:
            for cache in self.caches:
                keys = cache.unsqueeze(2)
                decode_attention_fwd(
                    self.query,
                    keys,
                    keys[..., :RANK],
                    self.out,
                    lse,
                    row_table,
                    lens,
                    logits,
                    splits,
                    SCALE,
                    KV_BLOCK,
                    k_scale=one,
                    v_scale=one,
                    is_mla=True,
                )

        return call

    def form(self, column: str) -> Callable[[], object]:
        """What a column of the table times."""
        kind, _, name = column.partition(" ")
        if name.startswith("tile"):
            tile = int(name.removeprefix("tile "))
            return self.triton_prefix(tile) if kind == "prefix" else self.triton_tail(tile)
        if name == "FLASH_ATTN_MLA":
            return self.flash_attention(causal=kind == "chain")
        return self.flashmla_prefix() if kind == "prefix" else self.triton_chain()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latent", description=__doc__)
    whole: dict[str, Any] = {"type": int, "nargs": "+"}
    parser.add_argument("--heads", type=int, default=8, help="query heads of one GPU")
    parser.add_argument("--budgets", default=[7, 31, 63], **whole)
    parser.add_argument("--batches", default=[1, 8, 32], **whole)
    parser.add_argument("--contexts", default=[1024, 16384], **whole)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args(argv)
    started = time.perf_counter()
    reasons: dict[str, str] = {}
    print(f"{torch.cuda.get_device_name()}, {args.heads} heads, microseconds a layer\n")
    print("| context | requests | budget | " + " | ".join(COLUMNS) + " |")
    print("|---" * (3 + len(COLUMNS)) + "|")
    with torch.device("cuda"):
        for context, batch, budget in itertools.product(args.contexts, args.batches, args.budgets):
            case = Case(args.heads, budget, batch, context, args.layers)
            chosen = f"prefix tile {case.chosen_tile()}", f"tail tile {latent_tail.TILE_ROWS}"
            cells = []
            for column in COLUMNS:
                try:
                    value = microseconds(case.form(column), args.repeats) / args.layers
                    cells.append(f"{value:.1f}{'*' if column in chosen else ''}")
                except Exception as error:  # another GPU; more shared memory than there is
                    reasons[column] = f"{type(error).__name__}: {error}"
                    cells.append("-")
            print(f"| {context} | {batch} | {budget} | " + " | ".join(cells) + " |", flush=True)
            del case
    for column, reason in reasons.items():
        print(f"\n{column}: {reason}")
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
