"""Scaled GEMM of consecutive groups of rows with one matrix each (a mixture of experts), in Triton for Hopper."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8compile.kernels.configs import PROGRAMS, TileConfig, choose_config, hint
from fp8compile.kernels.epilogue import finish_tile
from fp8compile.kernels.launch import launch
from fp8compile.kernels.operands import check_dtypes, flat_scale, operand_rows, zeros
from fp8compile.kernels.tiles import multiply_tiles, tile_position
from fp8compile.recipe import LARGEST


@triton.jit
def scaled_grouped_mm_kernel(
    out, scale_a, scale_b, offsets,
    GROUPS, M, N, K, SCALE_B_STEP, a, b,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SWAPPED: tl.constexpr, FAST: tl.constexpr, BY_ROW_A: tl.constexpr, BY_ROW_B: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tiles are numbered through all groups; each program takes every so-many-th. Tiles never reach over a group's end:
    rows of the next group are read but not stored."""
    n_tiles = tl.cdiv(N, BLOCK_N)
    k_blocks = tl.cdiv(K, BLOCK_K)
    tile = tl.program_id(0)
    first_tile = 0
    start = 0
    for group in tl.range(0, GROUPS):
        end = tl.load(offsets + group)
        m_tiles = tl.cdiv(end - start, BLOCK_M)
        while tile < first_tile + m_tiles * n_tiles:
            m_tile, n_tile = tile_position(tile - first_tile, m_tiles, n_tiles, GROUP_M)
            sums = multiply_tiles(
                a, b, start + m_tile * BLOCK_M, group * N + n_tile * BLOCK_N, 0, k_blocks,
                BLOCK_M, BLOCK_N, BLOCK_K, SWAPPED, FAST,
            )  # fmt: skip
            finish_tile(
                sums, m_tile * BLOCK_M, n_tile * BLOCK_N, tl.cast(start, tl.int64), end - start, N,
                out, scale_a + start if BY_ROW_A else scale_a, scale_b + group * SCALE_B_STEP,
                None, None, None, None, None, BY_ROW_A, BY_ROW_B, "none", COLUMNS,
            )  # fmt: skip
            tile += tl.num_programs(0)
        first_tile += m_tiles * n_tiles
        start = end
    tail_tiles = tl.cdiv(M - start, BLOCK_M) * n_tiles
    while tile < first_tile + tail_tiles:
        finish_tile(
            tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),
            (tile - first_tile) // n_tiles * BLOCK_M, (tile - first_tile) % n_tiles * BLOCK_N,
            tl.cast(start, tl.int64), M - start, N,
            out, None, None, None, None, None, None, None, False, False, "none", COLUMNS,
        )  # fmt: skip
        tile += tl.num_programs(0)


def launch_scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    fast: bool,
    *,
    config: TileConfig | None = None,
    programs: int = PROGRAMS,
) -> torch.Tensor:
    """``fp8compile::scaled_grouped_mm`` on Hopper's FP8 tensor cores.

    Args:
        a: FP8 ``[T, K]``. b: FP8 ``[E, N, K]``. At most one of the two is E5M2; rows start at multiples of 16 bytes.
        scale_a: float32 ``[T or 1, 1]``. scale_b: float32 ``[E or 1, N or 1, 1]``.
        offsets: int32 ``[E]``, where each group of rows ends, on the device; groups may be empty.
        out_dtype: a float, of the result ``[T, N]``; rows behind the last group are zero.
        fast: leave sums in the tensor cores' accumulator; otherwise every 128 products are added up in float32.
        config, programs: tiles instead of the chosen ones; size of the grid.

    Raises:
        ValueError: for what Hopper cannot do or what does not fit together, with the reason.
    """
    check_dtypes(a, b, scale_a, scale_b)
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != b.shape[2] or offsets.shape != b.shape[:1]:
        raise ValueError(
            f"scaled_grouped_mm: {tuple(a.shape)} in groups {tuple(offsets.shape)} times the transposes of "
            f"{tuple(b.shape)}"
        )
    if offsets.dtype != torch.int32:
        raise ValueError(f"offsets: int32, not {offsets.dtype}")
    if out_dtype in LARGEST:
        raise ValueError(f"scaled_grouped_mm: the result is a float, not {out_dtype}")
    (rows, k), (groups, n, _) = a.shape, b.shape
    if rows == 0 or n == 0 or groups == 0 or k == 0:
        return zeros(a, rows, n, dtype=out_dtype)
    config = config or choose_config(1, max(1, hint(rows) // hint(groups)), hint(n) * hint(groups), fast)
    scale_a, by_row_a, _ = flat_scale("scale_a", scale_a, 1, rows)
    scale_b, by_row_b, step_b = flat_scale("scale_b", scale_b, groups, n)
    written = launch(
        scaled_grouped_mm_kernel,
        programs,
        {
            "a": operand_rows("a", a),
            "b": operand_rows("b", b),
            "out": a.new_empty(rows, n, dtype=out_dtype),
            "scale_a": scale_a,
            "scale_b": scale_b,
            "offsets": offsets.contiguous(),
            "GROUPS": groups,
            "M": rows,
            "N": n,
            "K": k,
            "SCALE_B_STEP": step_b,
            "FAST": fast,
            "BY_ROW_A": by_row_a,
            "BY_ROW_B": by_row_b,
            **config.constexprs,
        },
        writes=["out"],
        blocks={"a": (config.block_m, config.block_k), "b": (config.block_n, config.block_k)},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return written["out"]
