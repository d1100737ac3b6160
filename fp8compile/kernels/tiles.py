"""Which tile of a GEMM comes when, and the sum over K that makes it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_position(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Row and column of a tile when tiles are walked in bands of GROUP_M rows, which share operands in the L2 cache."""
    band = tile // (GROUP_M * n_tiles)
    height = tl.minimum(m_tiles - band * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * n_tiles)
    return band * GROUP_M + within % height, within // height


@triton.jit
def multiply_tiles(
    a, b, first_row, first_column, first_k, last_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAPPED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Sum over the blocks ``[first_k, last_k)`` of K; float32 ``[BLOCK_M, BLOCK_N]``.

    SWAPPED computes the transpose: wgmma's M is at least 64, its N may be 8. Not FAST adds each block of K to the sums
    in float32.
    """
    if SWAPPED:
        sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(first_k, last_k):
        left = a.load([first_row, k * BLOCK_K])
        right = b.load([first_column, k * BLOCK_K])
        if SWAPPED:
            left, right = right, left
        if FAST:
            sums = tl.dot(left, right.T, sums)
        else:
            sums = tl.dot(left, right.T, sums, max_num_imprecise_acc=BLOCK_K)
    if SWAPPED:
        return sums.T
    else:
        return sums
