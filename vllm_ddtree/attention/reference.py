# SPDX-License-Identifier: Apache-2.0
"""Tree attention in plain PyTorch: what the kernels are tested against, and the CPU backend's core.

Row i of a tree attends to every key before the tree rows of its request (the prefix), to its
ancestors and to itself (DDTree, arXiv 2604.12989). The key of row i lies at linear position
prefix_len + i, whatever the depth of the row.
"""

import torch


def masked_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Softmax attention under a boolean mask, computed in float32 (float64 for float64 input).

    query   [n, Hq, Dh]
    keys    [m, Hkv, Dh]   head h of the query reads KV head h // (Hq / Hkv)
    values  [m, Hkv, Dv]
    mask    bool [n, m]    True: row n sees key m

    Returns [n, Hq, Dv] in the query's dtype; zeros for a row that sees no key.
    """
    compute = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // keys.shape[1]
    keys = keys.to(compute).repeat_interleave(group, dim=1)
    values = values.to(compute).repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", query.to(compute), keys) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
    return torch.einsum("hnm,mhd->nhd", weights, values).to(query.dtype)


def ancestor_mask(row_masks: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Unpack ancestor bits: int32 [n, W] to bool [n, num_rows].

    Column i is bit i % 32 of word i // 32.
    """
    column = torch.arange(num_rows, device=row_masks.device)
    return (row_masks[:, column // 32] >> (column % 32) & 1).bool()


def request_mask(
    query_len: int, seq_len: int, tail_len: int, row_masks: torch.Tensor
) -> torch.Tensor:
    """What the rows of one request see of its keys.

    row_masks  int32 [query_len, W]  ancestor bits; only the last ``tail_len`` rows are read

    Returns bool [query_len, seq_len]: causal for rows outside the tree; the prefix, the ancestors
    and the row itself for tree rows.
    """
    device = row_masks.device
    position = torch.arange(seq_len - query_len, seq_len, device=device)
    mask = torch.arange(seq_len, device=device)[None, :] <= position[:, None]
    if tail_len > 0:
        mask[-tail_len:, -tail_len:] = ancestor_mask(row_masks[-tail_len:], tail_len)
    return mask


def gather_cache(cache: torch.Tensor, blocks: torch.Tensor, num_keys: int) -> torch.Tensor:
    """The first ``num_keys`` keys of a request, in order.

    cache   [num_blocks, block_size, Hkv, Dh]
    blocks  int32 [max_blocks]  the request's row of the block table

    Returns [num_keys, Hkv, Dh]; only blocks that hold one of those keys are read.
    """
    num_blocks = -(-num_keys // cache.shape[1])
    return cache[blocks[:num_blocks].long()].flatten(0, 1)[:num_keys]


def tree_attention_reference(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tail_lens: torch.Tensor,
    row_masks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of a whole verify batch, one request after another; reads sizes on the host.

    query            [T, Hq, Dh]
    k_cache          [num_blocks, block_size, Hkv, Dh]  this step's keys already written
    v_cache          [num_blocks, block_size, Hkv, Dv]
    block_table      int32 [R, max_blocks]
    query_start_loc  int32 [R + 1]
    seq_lens         int32 [R]     keys of each request, this step's included
    tail_lens        int32 [R]     tree rows at the end of each request, 0 without a tree
    row_masks        int32 [T, W]  ancestor bits of tree rows

    Returns [T, Hq, Dv] in the query's dtype; zeros for rows past query_start_loc[R] and for
    requests without keys.
    """
    out = query.new_zeros(*query.shape[:2], v_cache.shape[-1])
    starts = query_start_loc.tolist()
    for req in range(len(starts) - 1):
        start, end = starts[req], starts[req + 1]
        seq_len, tail_len = int(seq_lens[req]), int(tail_lens[req])
        if end == start or seq_len == 0:
            continue
        mask = request_mask(end - start, seq_len, tail_len, row_masks[start:end])
        keys = gather_cache(k_cache, block_table[req], seq_len)
        values = gather_cache(v_cache, block_table[req], seq_len)
        out[start:end] = masked_attention(query[start:end], keys, values, mask, scale)
    return out
