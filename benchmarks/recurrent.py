# SPDX-License-Identifier: Apache-2.0
"""What trees cost on recurrent layers, in milliseconds a round of all layers.

usage: python -m benchmarks.recurrent --out FOLDER [--rows 8 16 64] [--batches 1 8 32]

Sizes are those of Qwen3.5-9B: 24 gated-delta-net layers with 16 key and 32 value heads of 128, a
convolution of 4 taps over 8192 channels, bfloat16 rows, float32 states. Kernels are replayed from
CUDA graphs. In a model, the weights stream through the L2 cache between two uses of a state: so
each replay starts with a write of 512 MiB, whose own time is subtracted. Columns:

rows         what the layers share, made once a round
inputs       convolution and gates of the tree rows, all layers
verify       the delta rule of the tree rows, all layers
commit       states along the accepted path, all layers
round        the four in one graph
vLLM conv    vLLM's convolution of a chain of as many rows, all layers
vLLM delta   its recurrent kernel, which keeps a state for each row, all layers
vLLM chain   the two in one graph

Writes recurrent.json and recurrent.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vllm_ddtree.recurrent.commit import StateCommit
from vllm_ddtree.recurrent.inputs import tree_inputs
from vllm_ddtree.recurrent.layer import RecurrentLayer
from vllm_ddtree.recurrent.rows import BLOCK_ROWS, RecurrentRows, TreeStep, prepare_recurrent_rows
from vllm_ddtree.recurrent.stash import Stash
from vllm_ddtree.recurrent.verify import tree_delta_rule
from vllm_ddtree.round.trees import TreeBuffers

COLUMNS = ["rows", "inputs", "verify", "commit", "round"]
VLLM_COLUMNS = ["vLLM conv", "vLLM delta", "vLLM chain"]

Case = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """The model."""

    layers: int = 24
    key_heads: int = 16
    heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    width: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


def random_trees(batch: int, num_rows: int, depth: int, device: str) -> TreeBuffers:
    """Trees of `num_rows` rows that hold a chain to `depth`, the other rows anywhere."""
    trees = TreeBuffers(batch, max(1, num_rows - 1), device)
    generator = torch.Generator().manual_seed(0)
    parents, bits, depths = [-1], [1], [0]
    for row in range(1, num_rows):
        parent = row - 1
        while row > depth or depths[parent] >= depth:
            parent = int(torch.randint(row, (), generator=generator))
            if depths[parent] < depth:
                break
        parents.append(parent)
        depths.append(depths[parent] + 1)
        bits.append(bits[parent] | 1 << row)
    words = trees.num_words
    masks = torch.tensor([[b >> 32 * w & 0xFFFFFFFF for w in range(words)] for b in bits])
    trees.parents[:, :num_rows] = torch.tensor(parents, dtype=torch.int32)
    trees.masks[:, :num_rows] = masks.to(torch.int32)  # bit 31 wraps into the sign
    return trees


def make_cases(
    sizes: Sizes,
    num_rows: int,
    batch: int,
    accepted: int,
    depth: int,
    device: str,
    dtype: torch.dtype,
) -> dict[str, Case]:
    """Each kernel as a call without arguments, over the trees of one random round."""
    s, total = sizes, batch * num_rows
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    layers = [
        RecurrentLayer(
            conv_states=normal(batch + 1, s.width - 1, s.channels).transpose(1, 2),
            states=torch.randn(batch + 1, s.heads, s.value_dim, s.key_dim, device=device),
            conv_weight=normal(s.channels, s.width),
            conv_bias=None,
            A_log=torch.rand(s.heads, device=device),
            dt_bias=normal(s.heads),
            num_key_heads=s.key_heads,
        )
        for _ in range(s.layers)
    ]
    trees = random_trees(batch, num_rows, depth, device)
    rows = RecurrentRows(total, batch, s.width, device)
    stash = Stash(s.layers, total, s.channels, s.heads, dtype, device)
    step = TreeStep(
        rows,
        trees.masks[:, :num_rows].flatten(0, 1).contiguous(),
        ints([i * num_rows for i in range(batch + 1)]),
        ints([num_rows] * batch),
        ints(list(range(1, batch + 1))),
        num_rows,
        min(depth, num_rows - 1),
    )
    # Projections as vLLM has them: a part of a wider row.
    inputs = normal(total, s.channels + s.heads * s.value_dim)[:, : s.channels]
    a, b = normal(total, s.heads), normal(total, s.heads)
    qkv, out = normal(total, s.channels), normal(total, s.heads, s.value_dim)
    updates = None
    if num_rows > BLOCK_ROWS:
        updates = torch.empty(total, s.heads, s.value_dim, device=device)
    commit = StateCommit(layers, stash, [0] * s.layers)
    index = torch.arange(batch, device=device)
    length = min(accepted, depth + 1, num_rows)
    path_rows = torch.arange(depth + 1, device=device, dtype=torch.int32).repeat(batch, 1)
    path_lens = ints([length] * batch)

    def prepare() -> None:
        prepare_recurrent_rows(trees, rows, index, step.tail_lens, batch, total)

    def convolve() -> None:
        for i, layer in enumerate(layers):
            tree_inputs(layer, step, inputs, a, b, qkv, stash[i])

    def verify() -> None:
        for i, layer in enumerate(layers):
            tree_delta_rule(layer, step, qkv, stash[i].gates, out, updates)

    def move() -> None:
        commit.commit(rows, step.state_indices[None], step.tail_lens, path_rows, path_lens, batch)

    def whole() -> None:
        prepare()
        for i, layer in enumerate(layers):
            tree_inputs(layer, step, inputs, a, b, qkv, stash[i])
            tree_delta_rule(layer, step, qkv, stash[i].gates, out, updates)
        move()

    # Each replay moves the states on, but no kernel's work depends on the values.
    return {"rows": prepare, "inputs": convolve, "verify": verify, "commit": move, "round": whole}


def vllm_cases(
    sizes: Sizes, num_rows: int, batch: int, device: str, dtype: torch.dtype
) -> dict[str, Case]:
    """vLLM's own kernels for chains of as many rows. All layers share one set of states, whose
    size (a state for every row) keeps it out of the L2 cache."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
    from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating_delta_rule_update

    s, total = sizes, batch * num_rows
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    slots = torch.arange(1, total + 1, device=device, dtype=torch.int32).view(batch, num_rows)
    states = torch.randn(total + 1, s.heads, s.value_dim, s.key_dim, device=device)
    conv_states = normal(total + 1, s.width + num_rows - 2, s.channels).transpose(1, 2)
    weight, A_log, dt_bias = (
        normal(s.channels, s.width),
        torch.rand(s.heads, device=device),
        normal(s.heads),
    )
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * num_rows
    accepted = torch.ones(batch, device=device, dtype=torch.int32)
    inputs, a, b = normal(total, s.channels), normal(total, s.heads), normal(total, s.heads)
    keys = s.key_heads * s.key_dim

    def convolve() -> None:
        for _ in range(s.layers):
            causal_conv1d_update(
                inputs,
                conv_states,
                weight,
                None,
                "silu",
                conv_state_indices=slots[:, 0],
                num_accepted_tokens=accepted,
                query_start_loc=starts,
                max_query_len=num_rows,
            )

    def delta() -> None:
        for _ in range(s.layers):
            q, k, v = inputs[None].split([keys, keys, s.heads * s.value_dim], dim=-1)
            fused_sigmoid_gating_delta_rule_update(
                A_log=A_log,
                a=a,
                b=b,
                dt_bias=dt_bias,
                q=q.unflatten(-1, (s.key_heads, s.key_dim)),
                k=k.unflatten(-1, (s.key_heads, s.key_dim)),
                v=v.unflatten(-1, (s.heads, s.value_dim)),
                initial_state=states,
                inplace_final_state=True,
                cu_seqlens=starts,
                ssm_state_indices=slots,
                num_accepted_tokens=accepted,
                use_qk_l2norm_in_kernel=True,
            )

    def both() -> None:
        convolve()
        delta()

    return {"vLLM conv": convolve, "vLLM delta": delta, "vLLM chain": both}


def milliseconds(case: Case, replays: int = 15) -> float:
    """Median time of one call on cold caches, from replays of a CUDA graph."""
    flush = torch.empty(512 << 20, dtype=torch.int8, device="cuda")

    def captured(calls: list[Case]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def median(graph: torch.cuda.CUDAGraph) -> float:
        times = []
        for _ in range(replays + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times[2:])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            case()
    torch.cuda.current_stream().wait_stream(stream)
    alone = median(captured([flush.zero_]))
    return median(captured([flush.zero_, case])) - alone


def table_of(results: list[dict[str, float]]) -> str:
    """Markdown table of the measurements, milliseconds a round."""
    columns = [name for name in [*COLUMNS, *VLLM_COLUMNS] if any(name in r for r in results)]
    head = ["requests", "rows", *columns]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in results:
        cells = [f"{row['batch']:.0f}", f"{row['num_rows']:.0f}"]
        cells += [f"{row[name]:.3f}" if name in row else "" for name in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 64], help="root included")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--accepted", type=int, default=6, help="rows of the path, root included")
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--no-vllm", action="store_true", help="without vLLM's columns")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    import vllm

    sizes = Sizes()
    info = {
        "gpu": torch.cuda.get_device_name(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "sizes": asdict(sizes),
        "accepted": args.accepted,
        "depth": args.depth,
    }
    results: list[dict[str, float]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    for batch, num_rows in itertools.product(args.batches, args.rows):
        row: dict[str, float] = {"batch": batch, "num_rows": num_rows}
        device, dtype = "cuda", torch.bfloat16
        cases = make_cases(sizes, num_rows, batch, args.accepted, args.depth, device, dtype)
        for name, case in cases.items():
            row[name] = milliseconds(case)
        del cases
        torch.cuda.empty_cache()
        if not args.no_vllm:
            for name, case in vllm_cases(sizes, num_rows, batch, device, dtype).items():
                row[name] = milliseconds(case)
            torch.cuda.empty_cache()
        results.append(row)
        print({name: round(value, 4) for name, value in row.items()}, flush=True)
        report = {"info": info, "milliseconds": results}
        (args.out / "recurrent.json").write_text(json.dumps(report, indent=1))
        text = f"{info['gpu']}, vLLM {info['vllm']}, PyTorch {info['torch']}\n\n"
        text += f"Milliseconds a round, {sizes.layers} layers, {args.accepted} rows accepted.\n\n"
        (args.out / "recurrent.md").write_text(text + table_of(results) + "\n")
    print(table_of(results))


if __name__ == "__main__":
    main()
