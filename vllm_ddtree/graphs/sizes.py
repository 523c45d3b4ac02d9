# SPDX-License-Identifier: Apache-2.0
"""Which batches get a CUDA graph, counted in requests.

A request has block size tokens in a draft and budget + 1 in a verify step. Each has a plan of its
own, so that neither leaves holes in the other.
"""

MAX_VERIFY_TOKENS = 2048
"""Tokens of the largest captured verify batch, for given budgets."""
MAX_AUTO_TOKENS = 1024
"""Tokens of the largest captured verify batch of `"budget": "auto"`, which has smaller budgets for
more requests."""
MAX_DRAFT_TOKENS = 2048
"""Tokens of the largest captured draft batch. Its logits stay in the graphs' memory pool: 0.3 MB a
token for a vocabulary of 152k in half precision."""


def request_counts(limit: int) -> list[int]:
    """Request counts with a graph, up to `limit`; dense where padding costs most.

    The steps between them are those of vLLM's own plan (config/vllm.py, `_set_cudagraph_sizes`).
    """
    counts = {1, 2, 4, *range(8, 257, 8), *range(272, limit + 1, 16), limit}
    return sorted(n for n in counts if n <= limit)


def draft_sizes(
    block_size: int, max_num_seqs: int, max_num_batched_tokens: int, verify_sizes: list[int]
) -> list[int]:
    """Capture sizes of the draft forward, in tokens, each a whole number of blocks.

    The largest captured batch has `MAX_DRAFT_TOKENS`, or as many tokens as that of the verify step
    if those are more.

    Args:
        block_size: query tokens a request.
        max_num_seqs: most requests in a batch.
        max_num_batched_tokens: size of the draft's input buffers, tokens.
        verify_sizes: capture sizes of the verify step, tokens.

    Returns:
        Ascending token counts; empty if the verify step has no graphs.

    """
    if not verify_sizes:
        return []
    tokens = min(max_num_batched_tokens, max(MAX_DRAFT_TOKENS, *verify_sizes))
    limit = min(max_num_seqs, tokens // block_size)
    return [n * block_size for n in request_counts(limit)]


def context_sizes(block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Capture sizes of the drafter's context alone, in tokens, each a whole number of blocks.

    Padding costs next to nothing here, so few sizes serve all numbers of requests.
    """
    limit = min(max_num_seqs, max_num_batched_tokens // block_size)
    powers = [2**k for k in range(limit.bit_length())]
    counts = {*powers, *(3 * p for p in powers), limit}
    return [n * block_size for n in sorted(counts) if n <= limit]


def auto_sizes(largest: int, rows: list[int], limit: int) -> list[int]:
    """Capture sizes of the verify step, in tokens, for `"budget": "auto"`.

    Its budgets + 1 are 2^k or 3 * 2^k. So sizes of that kind serve 1, 2, 3, 4, 6, 8, 12, ...
    requests of each budget with few graphs; a dense plan would capture every multiple of 8 for
    every budget. The most requests that may run have graphs of their own, because no larger batch
    is captured.

    Args:
        largest: ceiling, tokens.
        rows: budget + 1 of every budget.
        limit: most requests that may run.

    """
    powers = [2**k for k in range(largest.bit_length())]
    sizes = {*powers, *(3 * p for p in powers), *(limit * n for n in rows)}
    return sorted(size for size in sizes if size <= largest)


def verify_sizes(own: list[int], tiers: list[tuple[int, int]], largest: int) -> list[int]:
    """Capture sizes of the verify step, in tokens, for given budgets.

    vLLM's plan ends at 512 tokens on most GPUs (config/vllm.py, `_set_cudagraph_sizes`): 16
    requests of budget 31.

    Args:
        own: vLLM's sizes.
        tiers: (budget + 1, most requests that run with it) of each budget.
        largest: ceiling, tokens.

    """
    more = {n * rows for rows, limit in tiers for n in request_counts(limit)}
    return sorted({*own, *(size for size in more if size <= largest)})
