# SPDX-License-Identifier: Apache-2.0
"""Tree attention in plain PyTorch: what the kernels are tested against, and the CPU backend's core.

Row i of a tree attends to every key before the tree rows of its request (the prefix), to its
ancestors and to itself (DDTree, arXiv 2604.12989). The key of row i lies at linear position
prefix_len + i, whatever the depth of the row; its position along the branch, which a sliding window
counts, is prefix_len + depth.
"""

import torch


def masked_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention under a boolean mask, computed in float32 (float64 for float64 input).

    Args:
        query: [n, Hq, Dh].
        keys: [m, Hkv, Dh]; head h of the query reads KV head h // (Hq / Hkv).
        values: [m, Hkv, Dv].
        mask: bool [n, m], whether row n sees key m.
        scale: what scores are multiplied by.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); 0: they stay.
        sinks: [Hq], one more score a head (as it is: neither scaled nor capped), with the value 0.

    Returns:
        [n, Hq, Dv] in the query's dtype; zeros for a row that sees no key.

    """
    compute = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // keys.shape[1]
    keys = keys.to(compute).repeat_interleave(group, dim=1)
    values = values.to(compute).repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", query.to(compute), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.to(compute)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : mask.shape[1]]
    weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
    return torch.einsum("hnm,mhd->nhd", weights, values).to(query.dtype)


def ancestor_mask(row_masks: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Unpack ancestor bits: int32 [n, W] to bool [n, num_rows].

    Column i is bit i % 32 of word i // 32.
    """
    column = torch.arange(num_rows, device=row_masks.device)
    return (row_masks[:, column // 32] >> (column % 32) & 1).bool()


def request_mask(
    query_len: int, seq_len: int, tail_len: int, row_masks: torch.Tensor, window: int = 0
) -> torch.Tensor:
    """What the rows of one request see of its keys.

    Args:
        query_len: rows of the request, its last ones.
        seq_len: its keys, those of the rows included.
        tail_len: tree rows among the last.
        row_masks: int32 [query_len, W], ancestor bits; only the last `tail_len` rows are read.
        window: positions that a row sees, its own included; 0: all.

    Returns:
        bool [query_len, seq_len]: causal for rows outside the tree; the prefix, the ancestors and
        the row itself for tree rows; of these, what lies within the window along the branch.

    """
    key_position = torch.arange(seq_len, device=row_masks.device)
    mask = key_position[None, :] <= key_position[seq_len - query_len :, None]
    if tail_len > 0:
        ancestors = ancestor_mask(row_masks[-tail_len:], tail_len)
        mask[-tail_len:, -tail_len:] = ancestors
        key_position[-tail_len:] = seq_len - tail_len + ancestors.sum(dim=1) - 1
    if window:
        position = key_position[seq_len - query_len :]
        mask &= position[:, None] - key_position[None, :] < window
    return mask


def gather_cache(
    cache: torch.Tensor, blocks: torch.Tensor, num_keys: int, first: int = 0
) -> torch.Tensor:
    """Keys [first, num_keys) of a request, in order.

    Args:
        cache: [num_blocks, block_size, Hkv, Dh].
        blocks: int32 [max_blocks], the request's row of the block table.
        num_keys: the key after the last.
        first: the first key.

    Returns:
        [num_keys - first, Hkv, Dh]; only blocks that hold one of those keys are read.

    """
    block_size = cache.shape[1]
    first_block, num_blocks = first // block_size, -(-num_keys // block_size)
    keys = cache[blocks[first_block:num_blocks].long()].flatten(0, 1)
    return keys[first - first_block * block_size : num_keys - first_block * block_size]


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
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a whole verify batch, one request after another; reads sizes on the host.

    Args:
        query: [T, Hq, Dh].
        k_cache: [num_blocks, block_size, Hkv, Dh], this step's keys already written.
        v_cache: [num_blocks, block_size, Hkv, Dv].
        block_table: int32 [R, max_blocks], blocks of each request.
        query_start_loc: int32 [R + 1], first row of each request.
        seq_lens: int32 [R], keys of each request, this step's included.
        tail_lens: int32 [R], tree rows at the end of each request, 0 without a tree.
        row_masks: int32 [T, W], ancestor bits of tree rows.
        scale: what scores are multiplied by.
        window: as in `request_mask`. Keys before every row's window are not read: their blocks may
            be another request's by now.
        soft_cap: as in `masked_attention`.
        sinks: as in `masked_attention`.

    Returns:
        [T, Hq, Dv] in the query's dtype; zeros for rows past query_start_loc[R] and for requests
        without keys.

    """
    out = query.new_zeros(*query.shape[:2], v_cache.shape[-1])
    starts = query_start_loc.tolist()
    for req in range(len(starts) - 1):
        start, end = starts[req], starts[req + 1]
        seq_len, tail_len = int(seq_lens[req]), int(tail_lens[req])
        if end == start or seq_len == 0:
            continue
        mask = request_mask(end - start, seq_len, tail_len, row_masks[start:end], window)
        first = max(0, seq_len - (end - start) - window + 1) if window else 0
        keys = gather_cache(k_cache, block_table[req], seq_len, first)
        values = gather_cache(v_cache, block_table[req], seq_len, first)
        out[start:end] = masked_attention(
            query[start:end], keys, values, mask[:, first:], scale, soft_cap, sinks
        )
    return out


def latent_attention_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    block_table: torch.Tensor,
    tail_ends: torch.Tensor,
    tail_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    row_masks: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Multi-head latent attention of tail rows, one request after another (DeepSeek-V2, arXiv
    2405.04434, section 2.1); reads sizes on the host. Rows outside tails stay as they are.

    All heads share one cached row a token: it is the key, and its first `rank` elements are the
    value. The heads' own up-projections are in the query already, and follow after the output.

    Args:
        query: [T, Hq, rank + rope].
        cache: [num_blocks, block_size, rank + rope], this step's rows already written.
        rank: elements of a value.
        block_table: int32 [R, max_blocks], blocks of each request.
        tail_ends: int32 [>= R], row after the last tail row of each request.
        tail_lens: int32 [>= R], rows of each request's tail, 0: none.
        prefix_lens: int32 [>= R], keys before the tail.
        row_masks: int32 [T, W], ancestor bits of tail rows; None: each sees all before it.
        out: [T, Hq, rank], written.
        scale: what scores are multiplied by.

    """
    keys_of_blocks = cache.unsqueeze(2)
    for req in range(block_table.shape[0]):
        end, length, prefix = int(tail_ends[req]), int(tail_lens[req]), int(prefix_lens[req])
        if length == 0:
            continue
        rows = slice(end - length, end)
        bits = query.new_zeros(length, 1, dtype=torch.int32)
        in_tree = length if row_masks is not None else 0
        mask = request_mask(
            length, prefix + length, in_tree, bits if row_masks is None else row_masks[rows]
        )
        keys = gather_cache(keys_of_blocks, block_table[req], prefix + length)
        out[rows] = masked_attention(query[rows], keys, keys[..., :rank], mask, scale)
