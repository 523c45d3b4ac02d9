# SPDX-License-Identifier: Apache-2.0
"""Matrix products and the triangular system of a block of tree rows, inside kernels.

The triangular system (I + M) U = R is solved by levels. A row's level is the number of its
ancestors in its block of rows, and M only leads from lower levels to higher ones. The inverse of
the diagonal parts of M over groups of 2^s levels, T_s, starts as the identity (one level), and

    T_{s+1} = T_s - T_s M_s T_s        M_s: M from the lower to the upper half of each new group

so log2(levels) steps give the inverse: 4 for trees of depth 15, whatever the number of rows. Each
T_s is an inverse in itself and its entries stay small, unlike the powers of M, which an expansion
in them would have to cancel.

For bfloat16 rows the tensor cores' products serve, each with more bits than the outputs are rounded
to: products of rows with rows are exact, float32 factors go in as two bfloat16 parts (16 bits), and
the inverse, whose elements are at most 1 (a row's update is a contraction), as float16 (11 bits).
Nothing but outputs leaves this kernel, so no error lives on in a state.
"""

from vllm.triton_utils import tl, triton


@triton.jit
def load_rows(base_ptr, row, stride, in_rows, column, in_columns):
    """[rows, columns] in the rows' dtype, 0 outside."""
    return tl.load(
        base_ptr + row[:, None] * stride + column[None, :],
        mask=in_rows[:, None] & in_columns[None, :],
        other=0.0,
    )


@triton.jit
def inverse_norm(x):
    """1 / sqrt(x . x + epsilon) of each row: products of raw bfloat16 rows are exact, and scaled
    afterwards."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def path_decay(sees, total, total_before):
    """exp of the decays' sum after row j up to row i, 0 if j is not on the path to i."""
    # The mask first: between rows that are not related the difference may be positive.
    return tl.exp(tl.where(sees, total[:, None] - total_before[None, :], float("-inf")))


@triton.jit
def state_product(rows, state, EXACT: tl.constexpr):
    """rows [M, K] times the transpose of the float32 state [V, K]."""
    if rows.dtype == tl.bfloat16:
        # The state in two parts: as bfloat16 alone it would lose what a float32 cache is for.
        high = state.to(tl.bfloat16)
        low = (state - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(rows, tl.trans(low), tl.dot(rows, tl.trans(high)))
    else:
        return product(rows.to(tl.float32), tl.trans(state), EXACT)


@triton.jit
def solve(
    m,  # [BLOCK_M, BLOCK_M]
    level,  # [BLOCK_M]
    right,  # [BLOCK_M, V]
    BLOCK_M: tl.constexpr,
    HALVINGS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """(I + m)^-1 right, where m leads from rows of lower levels to rows of higher ones."""
    i = tl.arange(0, BLOCK_M)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - _between_halves(m, level, 0)
    for s in tl.static_range(1, HALVINGS - 1):
        between = _small_product(inverse, _between_halves(m, level, s), EXACT)
        inverse -= _small_product(between, inverse, EXACT)
    # The last step on the right side itself.
    u = product(inverse, right, EXACT)
    up = product(_between_halves(m, level, HALVINGS - 1), u, EXACT)
    return u - product(inverse, up, EXACT)


@triton.jit
def product(x, y, EXACT: tl.constexpr):
    """x y of float32 matrices: as products of their bfloat16 parts, which have 16 bits together."""
    if EXACT:
        return tl.dot(x, y, input_precision="ieee")
    else:
        x_high = x.to(tl.bfloat16)
        x_low = (x - x_high.to(tl.float32)).to(tl.bfloat16)
        y_high = y.to(tl.bfloat16)
        y_low = (y - y_high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))


@triton.jit
def _small_product(x, y, EXACT: tl.constexpr):
    """x y of float32 matrices with elements of the size of 1: in float16, which has 11 bits."""
    if EXACT:
        return tl.dot(x, y, input_precision="ieee")
    else:
        return tl.dot(x.to(tl.float16), y.to(tl.float16))


@triton.jit
def _between_halves(m, level, s: tl.constexpr):
    """The part of m from the lower to the upper 2^s levels of each group of 2^(s + 1)."""
    half = level >> s
    is_upper = (half & 1) == 1
    return tl.where(is_upper[:, None] & (half[None, :] == half[:, None] - 1), m, 0.0)
