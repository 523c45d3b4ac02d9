# SPDX-License-Identifier: Apache-2.0
"""The most probable tokens of each draft position, with exact log-probs (DDTree, arXiv 2604.12989).

Two passes. The first streams the logits once and keeps, of every group of 256 tokens, the best
logit, and, of every chunk of groups, its share of the log-sum-exp. The second finds one candidate
after another: the best group holds it, and only that group is read again. The order (value
descending, token id ascending) is total. So the next candidate is the first one after the last, and
nothing needs to be crossed out.

Logits are compared as int32 images of the same order, with NaN as -inf and -0.0 as 0.0.

A tensor-parallel rank that holds a shard of the vocabulary finds the same of its shard
(`top_k_keys`); `merge_shards` (proposer/shards.py) makes one of all.
"""

import torch
from vllm.triton_utils import tl, triton

GROUP = 256  # tokens a group
CHUNK_GROUPS = 32  # groups a program of the first pass


class Candidates:
    """Persistent scratch of `top_k_log_probs` or `top_k_keys`, so that a call allocates nothing.

    Args:
        max_rows: most draft positions in one call (requests times positions).
        vocab: tokens of the draft vocabulary.
        top_k: candidates a position, at most `vocab`.
        device: where the scratch is.
        token_ids: int32 [vocab], ascending, for `top_k_keys`: the tokens of the shard, which may be
            fewer than `top_k`, or none.

    Raises:
        ValueError: a size does not fit.

    """

    def __init__(
        self,
        max_rows: int,
        vocab: int,
        top_k: int,
        device: torch.device | str,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        if top_k < 1 or (top_k > vocab and token_ids is None):
            raise ValueError(
                f"top_k must be between 1 and the {vocab} tokens of the vocabulary, got {top_k}"
            )
        if token_ids is not None and (token_ids.shape, token_ids.dtype) != ((vocab,), torch.int32):
            raise ValueError(
                f"token_ids must be int32 [{vocab}], got {token_ids.dtype} {list(token_ids.shape)}"
            )
        self.max_rows = max_rows
        self.vocab = vocab
        self.top_k = top_k
        self.token_ids = token_ids
        self.num_groups = max(1, triton.cdiv(vocab, GROUP))
        self.num_chunks = triton.cdiv(self.num_groups, CHUNK_GROUPS)
        self.group_max = torch.empty(max_rows, self.num_groups, dtype=torch.int32, device=device)
        """int32 [max_rows, G], image of the best logit of each group of 256 tokens."""
        self.chunk_max = torch.empty(max_rows, self.num_chunks, dtype=torch.float32, device=device)
        """float32 [max_rows, C], best logit of each chunk of 32 groups."""
        self.chunk_sum = torch.empty(max_rows, self.num_chunks, dtype=torch.float32, device=device)
        """float32 [max_rows, C], sum of exp(logit - chunk_max) over the chunk."""
        # On the CPU Triton's interpreter pays by the operation: there one program takes many rows.
        self.rows_per_program = 64 if torch.device(device).type == "cpu" else 1


def top_k_log_probs_reference(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_k_log_probs` in plain PyTorch.

    Args:
        logits: float [M, V].
        k: candidates a row.

    Returns:
        float32 and int64 [M, k], log-probs and token ids.

    """
    logits = logits.float()
    logits = torch.where(logits.isnan(), float("-inf"), logits)
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    shift = values[:, :1].where(values[:, :1] > float("-inf"), 0.0)
    total = (logits - shift).exp().sum(-1, keepdim=True)
    log_probs = values[:, :k] - shift - total.where(total > 0, 1.0).log()
    return log_probs, ids[:, :k]


def top_k_log_probs(
    logits: torch.Tensor,
    out_log_probs: torch.Tensor,
    out_ids: torch.Tensor,
    scratch: Candidates,
) -> None:
    """Write the `top_k` best tokens of each row and their log-probs over the whole vocabulary.

    A row's result does not depend on the other rows. Reads and writes only device memory and
    allocates nothing, so it can be captured in a graph.

    Args:
        logits: float16, bfloat16 or float32 [M, V], contiguous in the last dimension; NaN counts as
            -inf.
        out_log_probs: float32 [M, k], out: logit minus log-sum-exp, natural logarithm, descending.
        out_ids: int64 [M, k], out: token ids; equal logits in ascending order of id, so that every
            tensor-parallel rank holds the same tree.
        scratch: made for at least M rows and for this V and k; overwritten.

    Raises:
        ValueError: a shape or dtype does not fit.

    """
    num_rows = logits.shape[0]
    _check_logits(logits, scratch)
    check_out("out_log_probs", out_log_probs, (num_rows, scratch.top_k), torch.float32)
    check_out("out_ids", out_ids, (num_rows, scratch.top_k), torch.int64)
    _launch(logits, out_log_probs, out_ids, scratch)


def top_k_keys(logits: torch.Tensor, out_keys: torch.Tensor, scratch: Candidates) -> None:
    """Write what one shard of the vocabulary gives to `merge_shards`.

    Otherwise as `top_k_log_probs`.

    Args:
        logits: [M, V] as in `top_k_log_probs`, the shard's columns.
        out_keys: int64 [M, k + 1], out. The first k are the best tokens, each as a key whose order
            is that of the candidates: the image of the logit, then 2**31 - 1 - token id, 32 bits
            each. Beyond the last token of a shard come keys below all others. The last entry is the
            shard's share of the log-sum-exp: its best logit, then the sum of exp(logit - best), as
            float32 bits.
        scratch: made with `token_ids`; overwritten.

    Raises:
        ValueError: a shape or dtype does not fit.

    """
    if scratch.token_ids is None:
        raise ValueError("make Candidates with the shard's token_ids")
    _check_logits(logits, scratch)
    check_out("out_keys", out_keys, (logits.shape[0], scratch.top_k + 1), torch.int64)
    _launch(logits, None, out_keys, scratch)


def _launch(
    logits: torch.Tensor,
    out_log_probs: torch.Tensor | None,
    out: torch.Tensor,
    scratch: Candidates,
) -> None:
    """Both passes. Without `out_log_probs`, `out` takes a shard's keys, else the token ids."""
    num_rows = logits.shape[0]
    if num_rows == 0:
        return
    rows_per_program = min(scratch.rows_per_program, triton.next_power_of_2(num_rows))
    num_programs = triton.cdiv(num_rows, rows_per_program)
    _group_max_kernel[(num_programs, scratch.num_chunks)](
        logits,
        logits.stride(0),
        scratch.group_max,
        scratch.chunk_max,
        scratch.chunk_sum,
        num_rows,
        VOCAB=scratch.vocab,
        NUM_GROUPS=scratch.num_groups,
        NUM_CHUNKS=scratch.num_chunks,
        ROWS=rows_per_program,
        GROUP=GROUP,
        CHUNK_GROUPS=CHUNK_GROUPS,
        num_warps=8,
    )
    _top_k_kernel[(num_programs,)](
        logits,
        logits.stride(0),
        scratch.group_max,
        scratch.chunk_max,
        scratch.chunk_sum,
        scratch.token_ids,
        out_log_probs,
        0 if out_log_probs is None else out_log_probs.stride(0),
        out,
        out.stride(0),
        num_rows,
        VOCAB=scratch.vocab,
        NUM_GROUPS=scratch.num_groups,
        NUM_CHUNKS=scratch.num_chunks,
        TOP_K=scratch.top_k,
        ROWS=rows_per_program,
        GROUP=GROUP,
        GROUPS_BLOCK=triton.next_power_of_2(scratch.num_groups),
        CHUNKS_BLOCK=triton.next_power_of_2(scratch.num_chunks),
        num_warps=1,
    )


def _check_logits(logits: torch.Tensor, scratch: Candidates) -> None:
    """Host-side checks of shape, dtype and layout."""
    if logits.dim() != 2 or logits.shape[1] != scratch.vocab:
        raise ValueError(f"logits must be [M, {scratch.vocab}], got {list(logits.shape)}")
    if logits.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"logits must be float16, bfloat16 or float32, got {logits.dtype}")
    if logits.shape[0] > scratch.max_rows:
        raise ValueError(
            f"logits has {logits.shape[0]} rows; make Candidates with max_rows of at least that, "
            f"not {scratch.max_rows}"
        )
    _check_rows("logits", logits)


def check_out(name: str, tensor: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Raise ValueError unless an output has this shape and dtype, last dimension contiguous."""
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    _check_rows(name, tensor)


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(1) != 1 and tensor.shape[1] > 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(1)} in its last dimension; make it contiguous there"
        )


@triton.jit
def _load_logits(ptrs, in_vocab):
    """Logits as float32, and as int32 of the same order with less than -inf's outside the vocab."""
    x = tl.load(ptrs, mask=in_vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return x, tl.where(in_vocab, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)


@triton.jit
def value_of(image):
    """The float32 of an image."""
    bits = image ^ ((image >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def sum_parts(best, total):
    """Parts of a log-sum-exp, [rows, parts] best logits and sums of exp(logit - best): of all."""
    # Parts of -inf carry a best of 0 and no sum: they must not raise the common one.
    best = tl.where(total > 0.0, best, float("-inf"))
    shift = tl.max(best, axis=1)  # [rows]
    shift = tl.where(shift > float("-inf"), shift, 0.0)
    return shift, tl.sum(total * tl.exp(best - shift[:, None]), axis=1)


@triton.jit
def log_of(total):
    """Of a log-sum-exp's sum; all -inf: any finite number will do."""
    return tl.log(tl.where(total > 0.0, total, 1.0))


@triton.jit(do_not_specialize=["num_rows"])
def _group_max_kernel(
    logits_ptr,  # float [M, V]
    logits_stride,
    group_max_ptr,  # int32 [max_rows, G]
    chunk_max_ptr,  # float32 [max_rows, C]
    chunk_sum_ptr,  # float32 [max_rows, C]
    num_rows,
    VOCAB: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
):
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    chunk = tl.program_id(1)
    tile = tl.arange(0, ROWS * CHUNK_GROUPS)
    row = first_row + tile // CHUNK_GROUPS
    group = chunk * CHUNK_GROUPS + tile % CHUNK_GROUPS
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_vocab = (row < num_rows)[:, None] & (token < VOCAB)
    x, image = _load_logits(logits_ptr + (row * logits_stride)[:, None] + token, in_vocab)
    tl.store(
        group_max_ptr + row * NUM_GROUPS + group,
        tl.max(image, axis=1),
        mask=(row < num_rows) & (group < NUM_GROUPS),
    )

    x = tl.reshape(x, [ROWS, CHUNK_GROUPS * GROUP])
    best = tl.max(x, axis=1)
    # A chunk of -inf adds exp(-inf - 0) = 0.
    shift = tl.where(best > float("-inf"), best, 0.0)
    total = tl.sum(tl.exp(x - shift[:, None]), axis=1)
    row = first_row + tl.arange(0, ROWS)
    tl.store(chunk_max_ptr + row * NUM_CHUNKS + chunk, shift, mask=row < num_rows)
    tl.store(chunk_sum_ptr + row * NUM_CHUNKS + chunk, total, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _top_k_kernel(
    logits_ptr,  # float [M, V]
    logits_stride,
    group_max_ptr,  # int32 [max_rows, G]
    chunk_max_ptr,  # float32 [max_rows, C]
    chunk_sum_ptr,  # float32 [max_rows, C]
    token_ids_ptr,  # int32 [V] of a shard, or None
    out_log_probs_ptr,  # float32 [M, k], or None: of a shard
    out_log_probs_stride,
    out_ptr,  # int64 [M, k] ids, of a shard [M, k + 1] keys
    out_stride,
    num_rows,
    VOCAB: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    NONE: tl.constexpr = -2147483648  # below the image of -inf
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_batch = row < num_rows

    chunk = tl.arange(0, CHUNKS_BLOCK)[None, :]
    chunk_ptrs = row[:, None] * NUM_CHUNKS + chunk
    in_row = in_batch[:, None] & (chunk < NUM_CHUNKS)
    chunk_max = tl.load(chunk_max_ptr + chunk_ptrs, mask=in_row, other=float("-inf"))
    chunk_sum = tl.load(chunk_sum_ptr + chunk_ptrs, mask=in_row, other=0.0)
    shift, total = sum_parts(chunk_max, chunk_sum)  # [ROWS]
    log_total = log_of(total)
    out_ptrs = out_ptr + row * out_stride
    if token_ids_ptr is not None:
        share = shift.to(tl.int32, bitcast=True).to(tl.int64) << 32
        share |= total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.store(out_ptrs + TOP_K, share, mask=in_batch)

    group = tl.arange(0, GROUPS_BLOCK)[None, :]
    group_max = tl.load(
        group_max_ptr + row[:, None] * NUM_GROUPS + group,
        mask=in_batch[:, None] & (group < NUM_GROUPS),
        other=NONE,
    )  # [ROWS, GROUPS_BLOCK]
    member = tl.arange(0, GROUP)[None, :]
    logits_ptrs = logits_ptr + (row * logits_stride)[:, None] + member
    last = tl.full([ROWS], 2147483647, tl.int32)  # the candidate before: its image and its token
    last_token = tl.full([ROWS], -1, tl.int32)

    for rank in range(TOP_K):
        best = tl.max(group_max, axis=1)
        # Of equal groups the first one has the smaller ids.
        winner = tl.min(tl.where(group_max == best[:, None], group, GROUPS_BLOCK), axis=1)
        first = winner * GROUP
        in_vocab = in_batch[:, None] & (member < VOCAB - first[:, None])
        _, image = _load_logits(logits_ptrs + first[:, None], in_vocab)
        after = tl.where(best == last, last_token - first, -1)
        here = tl.where((image == best[:, None]) & (member > after[:, None]), member, GROUP)
        place = tl.min(here, axis=1)
        left = (image < best[:, None]) | (member > place[:, None]) & (image == best[:, None])
        rest = tl.max(tl.where(left, image, NONE), axis=1)
        group_max = tl.where(group == winner[:, None], rest[:, None], group_max)
        last = best
        last_token = first + place

        if token_ids_ptr is None:
            # In this order, far from zero no digits are lost.
            value = value_of(best) - shift - log_total
            tl.store(out_log_probs_ptr + row * out_log_probs_stride + rank, value, mask=in_batch)
            tl.store(out_ptrs + rank, last_token.to(tl.int64), mask=in_batch)
        else:
            there = in_batch & (last_token < VOCAB)
            token = tl.load(token_ids_ptr + last_token, mask=there, other=0)
            key = (best.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
            tl.store(out_ptrs + rank, key, mask=in_batch)
