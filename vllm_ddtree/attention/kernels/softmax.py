# SPDX-License-Identifier: Apache-2.0
"""The steps of a softmax over keys that come block by block, shared by the four kernels.

A tile keeps three values a row: the largest score so far, the sum of exp2(score - largest), and the
values weighted by the same exponentials. Each step rescales them to a new largest score (Milakov
and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135). Scores are logarithms to base
2: a softmax scale comes multiplied by log2(e).
"""

from vllm.triton_utils import tl, triton

LOG2_E = 1.4426950408889634


@triton.jit
def soft_capped(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP) of scores times log2(e), by exponentials that cannot overflow."""
    shrunk = tl.exp2(tl.abs(scores) * (-2.0 / CAP))
    capped = CAP * 1.4426950408889634 * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(scores < 0, -capped, capped)


@triton.jit
def online_softmax_step(scores, running_max, running_sum, acc, MAYBE_EMPTY: tl.constexpr):
    """Take in a block of scores, -inf where a row does not see a key.

    The caller adds the block's values to the accumulator, each times its weight.

    Args:
        scores: float32 [rows, keys], to base 2.
        running_max: float32 [rows], largest score so far.
        running_sum: float32 [rows], sum of exponentials so far.
        acc: float32 [rows, dim], weighted values so far.
        MAYBE_EMPTY: whether a row may have seen no key, this block included. Its maximum is -inf,
            and -inf - -inf must not reach its weights.

    Returns:
        The weights float32 [rows, keys] of the block, and the rescaled running_max, running_sum
        and acc.

    """
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    safe_max = new_max
    if MAYBE_EMPTY:
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - safe_max[:, None])
    decay = tl.exp2(running_max - safe_max)
    running_sum = running_sum * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    return weights, new_max, running_sum, acc


@triton.jit
def merge_part(lse_ptr, part_ptr, valid, in_tile, running_max, running_sum, acc):
    """Take in attention to other keys that is finished, as one key with its log-sum-exp as score.

    An infinite log-sum-exp of either sign marks an empty part, whose output is not read.

    Args:
        lse_ptr: [rows] pointers to the part's log-sum-exp, a natural logarithm.
        part_ptr: [rows, dim] pointers to the part's output.
        valid: bool [rows], rows that there are.
        in_tile: bool [rows, dim], elements that there are.
        running_max: float32 [rows], as in `online_softmax_step`.
        running_sum: float32 [rows], as there.
        acc: float32 [rows, dim], as there.

    Returns:
        The rescaled running_max, running_sum and acc, the part in them.

    """
    lse = tl.load(lse_ptr, mask=valid, other=float("-inf"))
    score = tl.where(lse == float("inf"), float("-inf"), lse) * 1.4426950408889634  # log2(e)
    filled = score > float("-inf")
    part = tl.load(part_ptr, mask=in_tile & filled[:, None], other=0.0).to(tl.float32)
    new_max = tl.maximum(running_max, score)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight = tl.exp2(score - safe_max)
    decay = tl.exp2(running_max - safe_max)
    running_sum = running_sum * decay + weight
    acc = acc * decay[:, None] + part * weight[:, None]
    return new_max, running_sum, acc
