# SPDX-License-Identifier: Apache-2.0
"""Turning a verify step's trees into chains: the drafter's most probable token at every depth.

On a chain every row sees all rows before it, so such a step is verified by a backend's own causal
attention, at the cost of vLLM's DFlash chain.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.round.trees import TreeBuffers


def as_chains(
    trees: TreeBuffers,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    input_ids: torch.Tensor,
    depth: int,
    num_reqs: int,
) -> None:
    """Lay each request's chain in its tree's rows: row i verifies the token of depth i.

    Rows beyond the depth stay as they are and lead nowhere. Trees that are chains already, for the
    sake of what their requests ask (`trees.chain`), are left alone. No host synchronisation.

    Args:
        trees: `parents` and `depths` of the batch's slots are rewritten; their masks are not, since
            causal attention reads none.
        idx_mapping: [num_reqs or more] int64, request -> slot.
        query_start_loc: [num_reqs + 1 or more] int32.
        cu_num_logits: [num_reqs + 1 or more] int32; n > 1 logits are n tree rows, the last of the
            request's query rows.
        input_ids: [num_tokens or more] int32, in/out.
        depth: deepest node of the trees.
        num_reqs: requests of the batch.

    """
    _as_chains_kernel[(num_reqs,)](
        trees.spines,
        trees.spines.stride(0),
        trees.chain,
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        input_ids,
        trees.parents,
        trees.depths,
        depth,
        NUM_ROWS=trees.num_rows,
        BLOCK=triton.next_power_of_2(trees.num_rows),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["depth"])
def _as_chains_kernel(
    spines_ptr,  # int32 [S, D]
    spines_stride,
    chain_ptr,  # int32 [S]
    idx_mapping_ptr,  # [num_reqs]
    query_start_loc_ptr,  # [num_reqs + 1]
    cu_num_logits_ptr,  # [num_reqs + 1]
    input_ids_ptr,  # [num_tokens]
    parents_ptr,  # int32 [S, NUM_ROWS]
    depths_ptr,  # int32 [S, NUM_ROWS]
    depth,
    NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    num_rows = tl.load(cu_num_logits_ptr + req + 1) - tl.load(cu_num_logits_ptr + req)
    stays = tl.load(chain_ptr + slot, mask=slot >= 0, other=1)
    if (num_rows > 1) & (stays == 0):
        root = tl.load(query_start_loc_ptr + req + 1).to(tl.int64) - num_rows
        row = tl.arange(0, BLOCK)
        is_node = (row > 0) & (row < num_rows)
        on_chain = is_node & (row <= depth)
        token = tl.load(spines_ptr + slot * spines_stride + row - 1, mask=on_chain, other=0)
        tl.store(input_ids_ptr + root + row, token, mask=on_chain)
        rows = slot * NUM_ROWS + row
        tl.store(parents_ptr + rows, tl.where(on_chain, row - 1, -1), mask=is_node)
        tl.store(depths_ptr + rows, tl.where(on_chain, row, 1), mask=is_node)
