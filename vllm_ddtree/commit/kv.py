# SPDX-License-Identifier: Apache-2.0
"""Move the accepted path's keys and values to where the next round expects them.

Tree row i was written to the slot of linear position num_computed + i. After the walk, the j-th
row of the accepted path must lie at the slot of row j, in every layer, so that the committed
sequence is contiguous again (DDTree, arXiv 2604.12989).
"""

from collections.abc import Sequence

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.round.paths import Paths

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class KVCompactor:
    """Compacts all layers of one KV cache group in one launch.

    Elements are moved bit by bit, as the widest integers that the layout allows. The compactor
    keeps the caches alive.

    Args:
        caches: per layer [num_blocks, Hkv, block_size, C], C = keys and values of one slot and
            head; equal shape, strides and dtype; any strides but the innermost, which is 1. Layers
            that share a cache may be listed several times: each cache is moved once.

    Raises:
        ValueError: there is no cache, or caches differ or are not contiguous innermost.

    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        unique = {cache.data_ptr(): cache for cache in caches}
        if not unique:
            raise ValueError("a KV cache group needs at least one cache")
        self.caches = list(unique.values())
        first = self.caches[0]
        if first.dim() != 4 or first.stride(3) != 1:
            raise ValueError("caches must be [num_blocks, Hkv, block_size, C], contiguous in C")
        for cache in self.caches:
            if (cache.shape, cache.stride(), cache.dtype, cache.device) != (
                first.shape,
                first.stride(),
                first.dtype,
                first.device,
            ):
                raise ValueError("the caches of a group must agree in shape, strides and dtype")

        _, self.num_kv_heads, self.block_size, num_elements = first.shape
        size = first.element_size()
        extents = [num_elements * size, *(stride * size for stride in first.stride()[:3]), *unique]
        self.word_size = word = next(
            word for word in _WORDS if all(extent % word == 0 for extent in extents)
        )
        self._word_dtype = getattr(tl, str(_WORDS[word]).removeprefix("torch."))
        self._num_words = num_elements * size // word
        self._strides = [stride * size // word for stride in first.stride()[:3]]
        self._pointers = torch.tensor(list(unique), dtype=torch.int64, device=first.device)

    def compact(
        self,
        slot_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        tail_lens: torch.Tensor,
        paths: Paths,
        num_reqs: int,
    ) -> None:
        """Copy the KV of tree row `paths.rows[r, j]` to the slot of tree row j, for every path row.

        Rows that stay in place, and rows without a slot, are neither read nor written.

        Args:
            slot_mapping: int64 [num_tokens], KV slot of each row in this group; negative: none.
            query_start_loc: int32 [num_reqs + 1 or more], first row of each request.
            tail_lens: int32 [num_reqs or more], tree rows at the end of each request; 0: no tree.
            paths: of the batch; the tree rows of a path ascend strictly, from 0.
            num_reqs: requests of the batch.

        """
        if num_reqs == 0:
            return
        grid = (num_reqs, self._pointers.shape[0], self.num_kv_heads)
        _compact_kernel[grid](
            self._pointers,
            slot_mapping,
            query_start_loc,
            tail_lens,
            paths.rows,
            paths.lens,
            *self._strides,
            paths.rows.stride(0),
            WORD=self._word_dtype,
            BLOCK_SIZE=self.block_size,
            NUM_WORDS=self._num_words,
            BLOCK_WORDS=triton.next_power_of_2(self._num_words),
            PATH_BLOCK=min(16, triton.next_power_of_2(paths.rows.shape[1])),
            num_warps=4,
        )


def with_heads(cache: torch.Tensor) -> torch.Tensor:
    """A cache as [num_blocks, Hkv, block_size, C].

    A cache of multi-head latent attention has no dimension of heads: it gets one of one head.
    """
    return cache if cache.dim() == 4 else cache.unsqueeze(1)


def make_compactors(caches: Sequence[torch.Tensor]) -> list[KVCompactor]:
    """Compactors of all caches of a KV group, which may hold layers of several shapes."""
    layouts: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for cache in caches:
        layouts.setdefault((cache.shape, cache.stride(), cache.dtype), []).append(cache)
    return [KVCompactor(alike) for alike in layouts.values()]


@triton.jit
def _compact_kernel(
    caches_ptr,  # int64 [num_caches], address of each cache
    slot_mapping_ptr,  # [T]
    query_start_loc_ptr,  # [R + 1]
    tail_lens_ptr,  # [R]
    path_rows_ptr,  # [R, P]
    path_lens_ptr,  # [R]
    stride_b,  # strides of the caches, in words
    stride_h,
    stride_s,
    path_rows_stride,
    WORD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    PATH_BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    tail_len = tl.load(tail_lens_ptr + req)
    path_len = tl.minimum(tl.load(path_lens_ptr + req), tail_len)
    if path_len <= 1:
        return
    # The path ascends strictly: if its last row is in place, all are.
    if tl.load(path_rows_ptr + req * path_rows_stride + path_len - 1) == path_len - 1:
        return

    cache = tl.cast(tl.load(caches_ptr + tl.program_id(1)), tl.pointer_type(WORD))
    cache += tl.program_id(2).to(tl.int64) * stride_h
    root = (tl.load(query_start_loc_ptr + req + 1) - tail_len).to(tl.int64)
    word = tl.arange(0, BLOCK_WORDS)

    # The source of one row can be the destination of a later one (paths 0 2 4: row 2 moves to 1,
    # then row 4 to 2). Sources lie at or after their destinations, so reading in ascending order,
    # each block before it is written, reads every row before it is overwritten. Inside a block the
    # barrier puts all reads before all writes; a later block only reads rows behind this block's
    # destinations, so its reads need not wait.
    for first in range(0, path_len, PATH_BLOCK):
        target = first + tl.arange(0, PATH_BLOCK)
        in_path = target < path_len
        source = tl.load(path_rows_ptr + req * path_rows_stride + target, mask=in_path, other=0)
        moves = in_path & (source != target)
        source_slot = tl.load(slot_mapping_ptr + root + source, mask=moves, other=-1)
        target_slot = tl.load(slot_mapping_ptr + root + target, mask=moves, other=-1)
        moves = moves & (source_slot >= 0) & (target_slot >= 0)
        in_tile = moves[:, None] & (word[None, :] < NUM_WORDS)
        source_offset = source_slot // BLOCK_SIZE * stride_b + source_slot % BLOCK_SIZE * stride_s
        target_offset = target_slot // BLOCK_SIZE * stride_b + target_slot % BLOCK_SIZE * stride_s
        content = tl.load(cache + source_offset[:, None] + word[None, :], mask=in_tile, other=0)
        tl.debug_barrier()
        tl.store(cache + target_offset[:, None] + word[None, :], content, mask=in_tile)
