# SPDX-License-Identifier: Apache-2.0
"""Turning a verify step's trees into chains: the drafter's most probable token at every depth.

On a chain every row sees all rows before it, so attention verifies such a step causally, with a
backend's own kernels, at the cost of vLLM's DFlash chain. Recurrent layers read the masks.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.round.layout import Layout
from vllm_ddtree.round.trees import TreeBuffers


def as_chains(trees: TreeBuffers, layout: Layout, input_ids: torch.Tensor, max_depth: int) -> None:
    """Lay each request's chain in its tree's rows: row i verifies the token of depth i.

    Rows deeper than `max_depth` keep their tokens and lead nowhere. Requests that verify their
    chain alone (`trees.chain_only`) have a chain already and are left alone. No host
    synchronisation.

    Args:
        trees: `parents`, `depths` and `masks` of the batch's requests are rewritten.
        layout: requests of the batch.
        input_ids: int32 [num_tokens or more], in/out, token of each batch row.
        max_depth: deepest node of a chain.

    """
    _as_chains_kernel[(layout.num_reqs,)](
        trees.chains,
        trees.chains.stride(0),
        trees.chain_only,
        layout.indices,
        layout.query_start_loc,
        layout.cu_num_logits,
        input_ids,
        trees.parents,
        trees.depths,
        trees.masks,
        max_depth,
        NUM_ROWS=trees.num_rows,
        NUM_WORDS=trees.num_words,
        BLOCK=triton.next_power_of_2(trees.num_rows),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["max_depth"])
def _as_chains_kernel(
    chains_ptr,  # int32 [S, D]
    chains_stride,
    chain_only_ptr,  # int32 [S]
    indices_ptr,  # [num_reqs]
    query_start_loc_ptr,  # [num_reqs + 1]
    cu_num_logits_ptr,  # [num_reqs + 1]
    input_ids_ptr,  # [num_tokens]
    parents_ptr,  # int32 [S, NUM_ROWS]
    depths_ptr,  # int32 [S, NUM_ROWS]
    masks_ptr,  # int32 [S, NUM_ROWS, NUM_WORDS]
    max_depth,
    NUM_ROWS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    index = tl.load(indices_ptr + req).to(tl.int64)
    num_rows = tl.load(cu_num_logits_ptr + req + 1) - tl.load(cu_num_logits_ptr + req)
    stays = tl.load(chain_only_ptr + index, mask=index >= 0, other=1)
    if (num_rows > 1) & (stays == 0):
        root = tl.load(query_start_loc_ptr + req + 1).to(tl.int64) - num_rows
        row = tl.arange(0, BLOCK)
        is_node = (row > 0) & (row < num_rows)
        on_chain = is_node & (row <= max_depth)
        token = tl.load(chains_ptr + index * chains_stride + row - 1, mask=on_chain, other=0)
        tl.store(input_ids_ptr + root + row, token, mask=on_chain)
        rows = index * NUM_ROWS + row
        tl.store(parents_ptr + rows, tl.where(on_chain, row - 1, -1), mask=is_node)
        tl.store(depths_ptr + rows, tl.where(on_chain, row, 1), mask=is_node)
        for word in tl.static_range(NUM_WORDS):
            # All rows up to this one; a row that leads nowhere sees the root and itself.
            up_to = tl.minimum(tl.maximum(row + 1 - 32 * word, 0), 32)
            before = tl.where(up_to == 32, -1, (1 << (up_to % 32)) - 1)
            own = tl.where(row // 32 == word, 1 << (row % 32), 0)
            alone = own | (1 if word == 0 else 0)
            mask = tl.where(on_chain, before, alone)
            tl.store(masks_ptr + rows * NUM_WORDS + word, mask, mask=is_node)
