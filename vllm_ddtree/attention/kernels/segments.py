# SPDX-License-Identifier: Apache-2.0
"""Prefixes cut into segments, each with a page table of its own.

For kernels that take a page table as FlashInfer does (flashinfer/page.py): `starts` tells which of
`pages` are a segment's, `last_lens` how many keys its last page has. The table is made on the
device: under asynchronous scheduling only the device knows the lengths.
"""

import torch
from vllm.triton_utils import tl, triton

MAX_SEGMENTS = 16
"""Of one prefix."""


class SegmentTable:
    """Persistent page table of the segments of up to `max_num_reqs` prefixes.

    Attributes:
        starts: int32 [MAX_SEGMENTS * max_num_reqs + 1], first entry of each segment in pages.
        last_lens: int32 [MAX_SEGMENTS * max_num_reqs], keys in its last page, 0: it is empty.
        pages: int32 [max_num_reqs * max_pages], blocks of the cache.

    """

    def __init__(
        self, max_num_reqs: int, max_pages: int, page_size: int, device: torch.device
    ) -> None:
        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.page_size = page_size
        self.starts = zeros(MAX_SEGMENTS * max_num_reqs + 1)
        self.last_lens = zeros(MAX_SEGMENTS * max_num_reqs)
        self.pages = zeros(max_num_reqs * max_pages)
        self._block_reqs = triton.next_power_of_2(max_num_reqs)

    def fill(self, block_table: torch.Tensor, lens: torch.Tensor, segments: int) -> None:
        """Cut the first keys of each request: segment s of request r becomes entry s * R + r.

        One launch, without a host synchronisation.

        Args:
            block_table: int32 [>= R, max_blocks], blocks of each request.
            lens: int32 [R], keys of each prefix.
            segments: at most MAX_SEGMENTS. The last ones of a short prefix are empty.

        """
        num_reqs = lens.shape[0]
        _cut_pages_kernel[(num_reqs, segments)](
            block_table,
            lens,
            self.starts,
            self.last_lens,
            self.pages,
            block_table.stride(0),
            num_reqs,
            segments,
            PAGE_SIZE=self.page_size,
            # Whole tiles of the attention kernels' keys.
            GRAIN=max(1, 64 // self.page_size),
            BLOCK_REQS=self._block_reqs,
            BLOCK=128,
        )


# The counts change every round: specialising on them would compile during serving.
@triton.jit(do_not_specialize=["num_reqs", "segments"])
def _cut_pages_kernel(
    block_table_ptr,  # [R, max_blocks]
    lens_ptr,  # [R]
    starts_ptr,  # [segments * R + 1]
    last_lens_ptr,  # [segments * R]
    pages_ptr,  # [sum of all prefixes' pages]
    table_stride,
    num_reqs,
    segments,
    PAGE_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,  # pages
    BLOCK_REQS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    segment = tl.program_id(1)

    # Of every request: its pages, and those before and in this segment.
    reqs = tl.arange(0, BLOCK_REQS)
    num_keys = tl.load(lens_ptr + reqs, mask=reqs < num_reqs, other=0)
    num_pages = (num_keys + PAGE_SIZE - 1) // PAGE_SIZE
    span = (num_pages + segments * GRAIN - 1) // (segments * GRAIN) * GRAIN
    before = tl.minimum(segment * span, num_pages)
    count = tl.minimum(before + span, num_pages) - before
    # The segments of a number lie together, request by request.
    start = tl.sum(before, 0) + tl.sum(tl.where(reqs < req, count, 0), 0)

    mine = reqs == req
    my_first = tl.sum(tl.where(mine, before, 0), 0)
    my_count = tl.sum(tl.where(mine, count, 0), 0)
    my_keys = tl.sum(tl.where(mine, num_keys, 0), 0)
    last_len = tl.minimum(my_keys - (my_first + my_count - 1) * PAGE_SIZE, PAGE_SIZE)
    entry = segment * num_reqs + req
    tl.store(starts_ptr + entry, start)
    tl.store(last_lens_ptr + entry, tl.where(my_count > 0, last_len, 0))
    if entry == segments * num_reqs - 1:
        tl.store(starts_ptr + entry + 1, start + my_count)

    row = block_table_ptr + req.to(tl.int64) * table_stride + my_first
    for first in range(0, my_count, BLOCK):
        page = first + tl.arange(0, BLOCK)
        there = page < my_count
        block = tl.load(row + page, mask=there, other=0)
        tl.store(pages_ptr + start + page, block, mask=there)
