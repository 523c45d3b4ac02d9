# SPDX-License-Identifier: Apache-2.0
"""The walk of sample-and-follow: from the root, while the target's choice is a child.

DDTree, arXiv 2604.12989, verification; the reference is `vllm_ddtree.tree.reference.accepted_path`.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.round.emitted import Emitted
from vllm_ddtree.round.layout import Layout
from vllm_ddtree.round.meter import Counts
from vllm_ddtree.round.paths import Paths
from vllm_ddtree.round.trees import TreeBuffers


def walk(
    choices: torch.Tensor,
    drafts: torch.Tensor,
    trees: TreeBuffers,
    layout: Layout,
    paths: Paths,
    emitted: Emitted,
    counts: Counts | None = None,
) -> None:
    """Follow the target's choices down each request's tree.

    A row is followed only if its draft is not negative (vLLM marks placeholders and drafts that a
    grammar refuses by -1). One launch does three jobs, all in place and without a host
    synchronisation:

    - the walk: `paths`, and the tokens in `emitted`;
    - the facts for the metrics, in `emitted`;
    - the counts for the meter.

    Args:
        choices: int64 [num_logits], the target's own next token at each tree row.
        drafts: int32 or int64 [num_logits], the token that each row verifies; -1 is never followed.
            The entry of a root is not looked at.
        trees: parents of the tree rows, and which requests verify their chain alone.
        layout: requests of the batch.
        paths: out, of the batch's requests. Entries of `gather_index` that belong to no path are
            left as they are.
        emitted: out, of the batch's requests. What lies past a path is left as it is.
        counts: in/out, the rows of requests with two tree rows or more are added. Requests that
            verify their chain alone are not counted.

    """
    _walk_kernel[(layout.num_reqs,)](
        choices,
        drafts,
        trees.parents,
        trees.parents.stride(0),
        trees.chain_only,
        layout.indices,
        layout.cu_num_logits,
        layout.query_start_loc,
        paths.rows,
        paths.rows.stride(0),
        paths.lens,
        paths.gather_index,
        emitted.tokens,
        emitted.tokens.stride(0),
        emitted.num_sampled,
        emitted.facts,
        emitted.facts.stride(0),
        None if counts is None else counts.claims,
        0 if counts is None else counts.claims.stride(0),
        None if counts is None else counts.totals,
        0 if counts is None else counts.totals.stride(0),
        emitted.tokens.shape[1],
        BLOCK=triton.next_power_of_2(trees.parents.shape[1]),
        num_warps=1,
    )


# Chunks of a large batch begin anywhere: no new kernel for each alignment.
@triton.jit(
    do_not_specialize_on_alignment=[
        "choices_ptr",
        "drafts_ptr",
        "indices_ptr",
        "cu_num_logits_ptr",
        "query_start_loc_ptr",
        "path_rows_ptr",
        "path_lens_ptr",
        "tokens_ptr",
        "num_sampled_ptr",
        "facts_ptr",
    ]
)
def _walk_kernel(
    choices_ptr,  # int64 [num_logits]
    drafts_ptr,  # int [num_logits]
    parents_ptr,  # int32 [max_num_reqs, N]
    parents_stride,
    chain_only_ptr,  # int32 [max_num_reqs]
    indices_ptr,  # int64 [num_reqs]
    cu_num_logits_ptr,  # int32 [num_reqs + 1]
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    path_rows_ptr,  # int32 [num_reqs, P]
    path_rows_stride,
    path_lens_ptr,  # int32 [num_reqs]
    gather_index_ptr,  # int64 [max_num_tokens]
    tokens_ptr,  # int64 [num_reqs, P]
    tokens_stride,
    num_sampled_ptr,  # int32 [num_reqs]
    facts_ptr,  # int64 [num_reqs, P]
    facts_stride,
    claims_ptr,  # int32 [max_num_reqs, N] or None
    claims_stride,
    totals_ptr,  # int64 [2, N] or None
    totals_stride,
    max_len,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    index = tl.load(indices_ptr + req)
    first = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    num_rows = tl.load(cu_num_logits_ptr + req + 1).to(tl.int64) - first
    root = tl.load(query_start_loc_ptr + req + 1).to(tl.int64) - num_rows

    row = tl.arange(0, BLOCK)
    is_row = row < num_rows
    draft = tl.load(drafts_ptr + first + row, mask=is_row, other=-1).to(tl.int64)
    tree_parent = tl.load(parents_ptr + index * parents_stride + row, mask=is_row, other=-1)
    parent = tl.where(draft >= 0, tree_parent, -1)
    facts_ptr += req * facts_stride
    tl.store(facts_ptr, tl.sum((parent >= 0).to(tl.int64), axis=0))

    current = tl.full((), 0, tl.int32)
    length = tl.full((), 0, tl.int32)
    alive = current == 0
    on_path = tl.zeros([BLOCK], tl.int64)
    for j in range(0, max_len):
        choice = tl.load(choices_ptr + first + current).to(tl.int64)
        tl.store(path_rows_ptr + req * path_rows_stride + j, current, mask=alive)
        tl.store(gather_index_ptr + root + j, root + current, mask=alive)
        tl.store(tokens_ptr + req * tokens_stride + j, choice, mask=alive)
        length += alive.to(tl.int32)
        on_path = tl.where((row == current) & alive, 1, on_path)
        # Siblings have distinct tokens, so at most one row matches.
        child = tl.max(tl.where((parent == current) & (draft == choice), row, -1), axis=0)
        alive = alive & (child >= 0)
        # Siblings stand in order of rank, none left out.
        older = (tree_parent == current) & (row < child)
        rank = tl.sum(older.to(tl.int64), axis=0)
        tl.store(facts_ptr + j + 1, rank, mask=alive & (j + 1 < max_len))
        current = tl.where(alive, child, current)
    tl.store(path_lens_ptr + req, length)
    tl.store(num_sampled_ptr + req, length)

    if totals_ptr is not None:
        counted = ((num_rows > 1) & (tl.load(chain_only_ptr + index) == 0)).to(tl.int64)
        claim = tl.load(claims_ptr + index * claims_stride + row, mask=is_row, other=0)
        tl.atomic_add(totals_ptr + row, claim * counted, mask=is_row, sem="relaxed")
        accepted = totals_ptr + totals_stride + row
        tl.atomic_add(accepted, on_path * counted, mask=is_row, sem="relaxed")


def path_logit_rows(paths: Paths, cu_num_logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Logit rows in path order, for what belongs to emitted tokens (logprobs).

    Args:
        paths: of the batch's requests.
        cu_num_logits: int32 [num_reqs + 1], running sum of the requests' logits.
        out: int64 [num_logits], out: entry first + j of a request becomes first + paths.rows[j];
            entries past the path become their own index.

    Returns:
        `out`.

    """
    num_reqs = cu_num_logits.shape[0] - 1
    _path_logit_rows_kernel[(num_reqs,)](
        paths.rows, paths.rows.stride(0), paths.lens, cu_num_logits, out, BLOCK=64, num_warps=1
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
