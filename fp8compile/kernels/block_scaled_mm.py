"""GEMM with a scale for each 1x128 block of ``a``, and each 128x128 or 1x128 block of ``b``, in Triton for Hopper."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8compile.kernels.configs import PROGRAMS, SQUARE, TOKENS_16, TOKENS_64, TileConfig, ceil_div, hint
from fp8compile.kernels.epilogue import finish_tile
from fp8compile.kernels.launch import launch
from fp8compile.kernels.operands import check_dtypes, operand_rows, zeros
from fp8compile.kernels.tiles import tile_position
from fp8compile.recipe import BLOCK, LARGEST


@triton.jit
def multiply_block_scaled_tiles(
    a, b, scale_a, scale_b, row, column, k_blocks, M, N, SCALE_A_ROW, SCALE_A_BLOCK, SCALE_B_ROW, SCALE_B_BLOCK,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAPPED: tl.constexpr, BY_ROW_B: tl.constexpr,
):  # fmt: skip
    """The sum over K of each block's product times its scales, which are applied one after the other."""
    if SWAPPED:
        sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    scale_a += rows.to(tl.int64) * SCALE_A_ROW
    if BY_ROW_B:
        scale_b += columns.to(tl.int64) * SCALE_B_ROW
    else:
        scale_b += (column // BLOCK_N).to(tl.int64) * SCALE_B_ROW
    for k in tl.range(0, k_blocks):
        left = a.load([row, k * BLOCK_K])
        right = b.load([column, k * BLOCK_K])
        by_row = tl.load(scale_a + k * SCALE_A_BLOCK, mask=rows < M, other=0.0)
        if BY_ROW_B:
            by_column = tl.load(scale_b + k * SCALE_B_BLOCK, mask=columns < N, other=0.0)
            if SWAPPED:
                sums += tl.dot(right, left.T) * by_row[None, :] * by_column[:, None]
            else:
                sums += tl.dot(left, right.T) * by_row[:, None] * by_column[None, :]
        else:
            by_block = tl.load(scale_b + k * SCALE_B_BLOCK)
            if SWAPPED:
                sums += tl.dot(right, left.T) * by_row[None, :] * by_block
            else:
                sums += tl.dot(left, right.T) * by_row[:, None] * by_block
    if SWAPPED:
        return sums.T
    else:
        return sums


@triton.jit
def block_scaled_mm_kernel(
    out, scale_a, scale_b, bias,
    M, N, K, SCALE_A_ROW, SCALE_A_BLOCK, SCALE_B_ROW, SCALE_B_BLOCK, a, b,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SWAPPED: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW_B: tl.constexpr,
):  # fmt: skip
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    k_blocks = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0)):
        m_tile, n_tile = tile_position(tile, m_tiles, n_tiles, GROUP_M)
        sums = multiply_block_scaled_tiles(
            a, b, scale_a, scale_b, m_tile * BLOCK_M, n_tile * BLOCK_N, k_blocks, M, N,
            SCALE_A_ROW, SCALE_A_BLOCK, SCALE_B_ROW, SCALE_B_BLOCK, BLOCK_M, BLOCK_N, BLOCK_K, SWAPPED, BY_ROW_B,
        )  # fmt: skip
        finish_tile(
            sums, m_tile * BLOCK_M, n_tile * BLOCK_N, m_tile.to(tl.int64) * 0, M, N,
            out, None, None, bias, None, None, None, None, False, False, "none", COLUMNS,
        )  # fmt: skip


def choose_block_scaled_config(m: int) -> TileConfig:
    """Tiles of 128 columns, which may share a scale of ``b``."""
    return TOKENS_16 if m <= 16 else TOKENS_64 if m <= 64 else SQUARE


def launch_block_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """``sum over blocks of K of (a_block @ b_blockᵀ) * scale_a_block * scale_b_block, + bias``.

    Args:
        a: FP8 ``[M, K]``. b: FP8 ``[N, K]``. At most one of the two is E5M2; rows start at multiples of 16 bytes.
        scale_a: float32 ``[M, ceil(K / 128)]``, any strides; columns that are contiguous are read fastest.
            Or ``[ceil(M / 128), ceil(K / 128)]``: one for 128 rows.
        scale_b: float32, the same for ``b``: ``[N or ceil(N / 128), ceil(K / 128)]``.
        bias: ``[N]`` of any float dtype.
        out_dtype: a float, of the result ``[M, N]``.
        config: tiles instead of the chosen ones.

    Raises:
        ValueError: for what Hopper cannot do or what does not fit together, with the reason.
    """
    check_dtypes(a, b, scale_a, scale_b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"block_scaled_mm: {tuple(a.shape)} times the transpose of {tuple(b.shape)}")
    (m, k), n = a.shape, b.shape[0]
    k_blocks = ceil_div(k, BLOCK)
    for name, scale, rows in (("scale_a", scale_a, m), ("scale_b", scale_b, n)):
        shapes = (rows, k_blocks), (ceil_div(rows, BLOCK), k_blocks)
        if scale.shape not in shapes:
            raise ValueError(
                f"{name}: shape {tuple(scale.shape)}, but the blocks of 1x128 are {shapes[0]}, of 128x128 {shapes[1]}"
            )
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias: shape {tuple(bias.shape)}, but the result has {n} columns")
    if out_dtype in LARGEST:
        raise ValueError(f"block_scaled_mm: the result is a float, not {out_dtype}")
    if m == 0 or n == 0 or k == 0:
        sums = zeros(a, m, n, dtype=torch.float32)
        return (sums if bias is None else sums + bias.float()).to(out_dtype)
    if scale_a.shape[0] != m:
        scale_a = scale_a.repeat_interleave(BLOCK, 0)[:m]
    config = config or choose_block_scaled_config(hint(m))
    written = launch(
        block_scaled_mm_kernel,
        torch.sym_min(config.tiles(1, m, n), PROGRAMS),
        {
            "a": operand_rows("a", a),
            "b": operand_rows("b", b),
            "out": a.new_empty(m, n, dtype=out_dtype),
            "scale_a": scale_a,
            "scale_b": scale_b,
            "bias": None if bias is None else bias.contiguous(),
            "M": m,
            "N": n,
            "K": k,
            "SCALE_A_ROW": scale_a.stride(0),
            "SCALE_A_BLOCK": scale_a.stride(1),
            "SCALE_B_ROW": scale_b.stride(0),
            "SCALE_B_BLOCK": scale_b.stride(1),
            "BY_ROW_B": scale_b.shape[0] == n,
            **config.constexprs,
        },
        writes=["out"],
        blocks={"a": (config.block_m, config.block_k), "b": (config.block_n, config.block_k)},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return written["out"]
