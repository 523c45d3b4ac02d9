# SPDX-License-Identifier: Apache-2.0
"""The reference agrees with something simpler: every tree row as the last token of its own
branch."""

import pytest
import torch

from vllm_ddtree.attention.kernels.reference import masked_attention, tree_attention_reference

from .tree_cases import Batch, chunk, make_batch, tree


def branch_attention(
    batch: Batch,
    req: int,
    row: int,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [Hq, Dh] of one row over a list of the keys it sees, one head at a time."""
    end = int(batch.query_start_loc[req + 1])
    seq_len, tail_len = int(batch.seq_lens[req]), int(batch.tail_lens[req])
    position = seq_len - end + row
    if row < end - tail_len:
        seen = list(range(position + 1))
    else:
        bits = int.from_bytes(batch.row_masks[row].cpu().numpy().tobytes(), "little")
        prefix_len = seq_len - tail_len
        seen = list(range(prefix_len)) + [prefix_len + i for i in range(tail_len) if bits >> i & 1]
    # The branch in order, the row last: a window is its end.
    seen = seen if window is None else seen[-window:]
    block_size, num_kv_heads = batch.k_cache.shape[1:3]
    out = torch.empty_like(batch.query[row])
    for head in range(out.shape[0]):
        kv_head = head // (out.shape[0] // num_kv_heads)
        at = [(int(batch.block_table[req, p // block_size]), p % block_size) for p in seen]
        keys = torch.stack([batch.k_cache[b, s, kv_head] for b, s in at])
        values = torch.stack([batch.v_cache[b, s, kv_head] for b, s in at])
        scores = keys @ batch.query[row, head] * batch.scale
        if soft_cap is not None:
            scores = (scores / soft_cap).tanh() * soft_cap
        weights = scores.exp()
        total = weights.sum() + (0 if sinks is None else sinks[head].exp())
        out[head] = weights @ values / total
    return out


@pytest.mark.parametrize("group", [1, 3])
def test_each_row_sees_its_own_branch(group: int) -> None:
    batch = make_batch(
        [tree(21, 9), chunk(4, 6), tree(0, 40, before=2), chunk(12, 1)],
        num_heads=2 * group,
        head_size=8,
        block_size=4,
        num_words=2,
        padded_rows=3,
        dtype=torch.float64,
    )
    out = tree_attention_reference(
        batch.query,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.tail_lens,
        batch.row_masks,
        batch.scale,
    )
    starts = batch.query_start_loc.tolist()
    for req in range(4):
        for row in range(starts[req], starts[req + 1]):
            expected = branch_attention(batch, req, row)
            torch.testing.assert_close(out[row], expected, rtol=1e-12, atol=1e-12)
    assert (out[starts[-1] :] == 0).all()


@pytest.mark.parametrize("soft_cap", [None, 0.7, 30.0])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 20, 64])
def test_windows_soft_caps_and_sinks(
    window: int | None, soft_cap: float | None, with_sinks: bool
) -> None:
    batch = make_batch(
        [tree(21, 9), chunk(14, 6), tree(3, 40, before=2), chunk(32, 1), tree(0, 5)],
        head_size=8,
        block_size=4,
        num_words=2,
        padded_reqs=1,
        window=window or 0,
        dtype=torch.float64,
    )
    sinks = torch.linspace(-1, 3, 4, dtype=torch.float64) if with_sinks else None
    out = tree_attention_reference(
        batch.query,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.tail_lens,
        batch.row_masks,
        batch.scale,
        window or 0,
        soft_cap or 0.0,
        sinks,
    )
    starts = batch.query_start_loc.tolist()
    for req in range(5):
        for row in range(starts[req], starts[req + 1]):
            expected = branch_attention(batch, req, row, window, soft_cap, sinks)
            torch.testing.assert_close(out[row], expected, rtol=1e-12, atol=1e-12)


def test_a_row_that_sees_nothing_is_zero() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 2, 8)
    keys = torch.randn(3, 1, 8)
    mask = torch.tensor([[False] * 3, [False, True, False]])
    out = masked_attention(query, keys, keys, mask, 1.0)
    assert (out[0] == 0).all()
    torch.testing.assert_close(out[1], keys[1].expand(2, 8))
