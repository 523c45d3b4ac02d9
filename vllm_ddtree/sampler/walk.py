# SPDX-License-Identifier: Apache-2.0
"""The walk of sample-and-follow: from the root, while the target's choice is a child.

DDTree, arXiv 2604.12989, verification; the reference is `vllm_ddtree.tree.reference.accepted_path`.
"""

import torch
from vllm.triton_utils import tl, triton


def walk(
    choices: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    path_rows: torch.Tensor,
    path_lens: torch.Tensor,
    path: torch.Tensor,
    chain: torch.Tensor | None = None,
    claims: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    facts: torch.Tensor | None = None,
) -> None:
    """Follow the target's choices down each request's tree.

    A row is followed only if its draft is not negative (vLLM marks placeholders and drafts that a
    grammar refuses by -1). No host synchronisation; everything is written in place.

    Args:
        choices: [num_logits] int64, the target's own next token at each tree row.
        drafts: [num_logits] int32 or int64, the token each row verifies (row 0: the root), -1
        never.
        parents: [max_num_reqs, N] int32, by request slot, -1 for the root and unused rows.
        idx_mapping: [num_reqs] int64, request -> slot.
        cu_num_logits: [num_reqs + 1] int32, rows of each request's tree.
        query_start_loc: [num_reqs + 1] int32; a request's tree rows are the last of its query rows.
        sampled: out [num_reqs, P] int64, accepted tokens then the bonus token.
        num_sampled: out [num_reqs] int32, accepted + 1.
        path_rows: out [num_reqs or more, P] int32, tree row of each path element, root first.
        path_lens: out [num_reqs or more] int32, path elements, root included.
        path: in/out [max_num_tokens] int64, gather index of the batch: entry j of a request's tree
        rows
            becomes the row of path element j; the others are left as they are.
        chain: [max_num_reqs] int32, by request slot, 1 for a spine; needed with counts.
        claims: [max_num_reqs, N] int32, by request slot, path probability of each row; needed with
            counts.
        counts: in/out [2, N] int64 (budget/meter.py): path probability of the verified rows, and
            accepted rows, over requests with two rows or more and no spine.
        facts: out [num_reqs, P] int64 (metrics/rounds.py): entry 0 the nodes that could be
            accepted, entry j the rank of path element j among its position's candidates; what lies
            past the path is left as it is.

    """
    num_reqs = idx_mapping.shape[0]
    max_len = sampled.shape[1]
    _walk_kernel[(num_reqs,)](
        choices,
        drafts,
        parents,
        parents.stride(0),
        idx_mapping,
        cu_num_logits,
        query_start_loc,
        sampled,
        sampled.stride(0),
        num_sampled,
        path_rows,
        path_rows.stride(0),
        path_lens,
        path,
        chain,
        claims,
        0 if claims is None else claims.stride(0),
        counts,
        0 if counts is None else counts.stride(0),
        facts,
        0 if facts is None else facts.stride(0),
        max_len,
        BLOCK=triton.next_power_of_2(parents.shape[1]),
        num_warps=1,
    )


# Chunks of a wide batch begin anywhere: no new kernel for each alignment.
@triton.jit(
    do_not_specialize_on_alignment=[
        "choices_ptr",
        "drafts_ptr",
        "idx_mapping_ptr",
        "cu_num_logits_ptr",
        "query_start_loc_ptr",
        "sampled_ptr",
        "num_sampled_ptr",
        "path_rows_ptr",
        "path_lens_ptr",
        "facts_ptr",
    ]
)
def _walk_kernel(
    choices_ptr,  # [num_logits]
    drafts_ptr,  # [num_logits]
    parents_ptr,  # [max_num_reqs, N]
    parents_stride,
    idx_mapping_ptr,  # [num_reqs]
    cu_num_logits_ptr,  # [num_reqs + 1]
    query_start_loc_ptr,  # [num_reqs + 1]
    sampled_ptr,  # [num_reqs, P]
    sampled_stride,
    num_sampled_ptr,  # [num_reqs]
    path_rows_ptr,  # [num_reqs, P]
    path_rows_stride,
    path_lens_ptr,  # [num_reqs]
    path_ptr,  # [max_num_tokens]
    chain_ptr,  # [max_num_reqs] or None
    claims_ptr,  # [max_num_reqs, N] or None
    claims_stride,
    counts_ptr,  # [2, N] or None
    counts_stride,
    facts_ptr,  # [num_reqs, P] or None
    facts_stride,
    max_len,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req)
    first = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    num_rows = tl.load(cu_num_logits_ptr + req + 1).to(tl.int64) - first
    base = tl.load(query_start_loc_ptr + req + 1).to(tl.int64) - num_rows

    row = tl.arange(0, BLOCK)
    is_row = row < num_rows
    draft = tl.load(drafts_ptr + first + row, mask=is_row, other=-1).to(tl.int64)
    tree_parent = tl.load(parents_ptr + slot * parents_stride + row, mask=is_row, other=-1)
    parent = tl.where(draft >= 0, tree_parent, -1)
    if facts_ptr is not None:
        facts = facts_ptr + req * facts_stride
        tl.store(facts, tl.sum((parent >= 0).to(tl.int64), axis=0))

    current = tl.full((), 0, tl.int32)
    length = tl.full((), 0, tl.int32)
    alive = current == 0
    on_path = tl.zeros([BLOCK], tl.int64)
    for j in range(0, max_len):
        choice = tl.load(choices_ptr + first + current).to(tl.int64)
        tl.store(path_rows_ptr + req * path_rows_stride + j, current, mask=alive)
        tl.store(path_ptr + base + j, base + current, mask=alive)
        tl.store(sampled_ptr + req * sampled_stride + j, choice, mask=alive)
        length += alive.to(tl.int32)
        on_path = tl.where((row == current) & alive, 1, on_path)
        # Siblings have distinct tokens, so at most one row matches.
        child = tl.max(tl.where((parent == current) & (draft == choice), row, -1), axis=0)
        alive = alive & (child >= 0)
        if facts_ptr is not None:
            # Siblings stand in order of rank, none left out.
            older = (tree_parent == current) & (row < child)
            rank = tl.sum(older.to(tl.int64), axis=0)
            tl.store(facts + j + 1, rank, mask=alive & (j + 1 < max_len))
        current = tl.where(alive, child, current)
    tl.store(path_lens_ptr + req, length)
    tl.store(num_sampled_ptr + req, length)
    if counts_ptr is not None:
        counted = ((num_rows > 1) & (tl.load(chain_ptr + slot) == 0)).to(tl.int64)
        claim = tl.load(claims_ptr + slot * claims_stride + row, mask=is_row, other=0)
        tl.atomic_add(counts_ptr + row, claim * counted, mask=is_row, sem="relaxed")
        accepted = counts_ptr + counts_stride + row
        tl.atomic_add(accepted, on_path * counted, mask=is_row, sem="relaxed")


def path_logit_rows(
    path_rows: torch.Tensor,
    path_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Logit rows in path order, for what belongs to emitted tokens (logprobs).

    Args:
        path_rows: [num_reqs, P] int32.
        path_lens: [num_reqs] int32.
        cu_num_logits: [num_reqs + 1] int32.
        out: [num_logits] int64; entry first + j of a request becomes first + path_rows[j]; the
        entries
            past the path become their own index.

    """
    num_reqs = cu_num_logits.shape[0] - 1
    _path_logit_rows_kernel[(num_reqs,)](
        path_rows, path_rows.stride(0), path_lens, cu_num_logits, out, BLOCK=64, num_warps=1
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["path_rows_ptr", "path_lens_ptr", "cu_num_logits_ptr"])
def _path_logit_rows_kernel(
    path_rows_ptr,  # [num_reqs, P]
    path_rows_stride,
    path_lens_ptr,  # [num_reqs]
    cu_num_logits_ptr,  # [num_reqs + 1]
    out_ptr,  # [num_logits]
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    end = tl.load(cu_num_logits_ptr + req + 1).to(tl.int64)
    length = tl.load(path_lens_ptr + req)
    for start in range(0, end - first, BLOCK):
        j = start + tl.arange(0, BLOCK)
        row = tl.load(path_rows_ptr + req * path_rows_stride + j, mask=j < length, other=0)
        row = tl.where(j < length, row, j).to(tl.int64)
        tl.store(out_ptr + first + j, first + row, mask=first + j < end)
