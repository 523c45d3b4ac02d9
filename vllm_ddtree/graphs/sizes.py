# SPDX-License-Identifier: Apache-2.0
"""Which batch sizes get a CUDA graph, counted in requests.

Draft and verify have different token counts a request (block size, budget + 1), so their graphs are
planned from one list of request counts, not from one list of token counts.
"""


def request_counts(verify_sizes: list[int], verify_len: int, limit: int) -> list[int]:
    """Request counts that the verify step's capture sizes cover.

    Args:
        verify_sizes: capture sizes of the verify step, tokens.
        verify_len: rows a request in the verify step, budget + 1.
        limit: the largest number of requests.

    Returns:
        Ascending request counts, none above `limit`; vLLM rounds a size up to whole requests.

    """
    largest = max(verify_sizes)
    counts = {-(-size // verify_len) for size in verify_sizes}
    return sorted(n for n in counts if n <= limit and n * verify_len <= largest)
