"""Transpose a matrix and bring it to FP8 with one scale, the largest of its rows' scales, in one read and one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8compile.formulas import SMALLEST_SCALE
from fp8compile.kernels.configs import ceil_div
from fp8compile.kernels.launch import launch
from fp8compile.recipe import LARGEST

BLOCK_ROWS = 128
BLOCK_COLUMNS = 128
SCALES_AT_ONCE = 1024
PROGRAMS = 4 * 132
"""Few enough that the scales, which every program reads all of, stay small beside the matrix; four per multiprocessor
of an H100, which hides the latency of memory."""


@triton.jit
def largest_scale(scales, rows, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    """The maximum of ``scales[0:rows]``; NaN if one of them is; SMALLEST if there are none."""
    largest = tl.full([BLOCK], SMALLEST, tl.float32)
    invalid = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scale = tl.load(scales + offsets, mask=offsets < rows, other=0.0)
        invalid = tl.maximum(invalid, (scale != scale).to(tl.int32))
        largest = tl.maximum(largest, scale)
    return tl.where(tl.max(invalid, axis=0) > 0, float("nan"), tl.max(largest, axis=0))


@triton.jit
def quantize_transposed_kernel(
    x,
    row_scale,
    data,
    scale,
    rows,
    columns,
    row_stride,
    data_rows,
    data_stride,
    LARGEST_VALUE: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SCALES_AT_ONCE: tl.constexpr,
):
    """``x [rows, columns]`` to ``data [data_rows, data_stride]``, which is padded with zeros."""
    one = largest_scale(row_scale, rows, SMALLEST, SCALES_AT_ONCE)
    if tl.program_id(0) == 0:
        tl.store(scale, one)
    tiles_down = tl.cdiv(data_stride, BLOCK_ROWS)
    tiles = tiles_down * tl.cdiv(data_rows, BLOCK_COLUMNS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile % tiles_down) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = (tile // tiles_down) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        source = row.to(tl.int64)[:, None] * row_stride + column[None, :]
        tl.static_assert(source.dtype == tl.int64, "offsets in a matrix may pass 2**31")
        value = tl.load(x + source, mask=inside, other=0.0)
        if IS_FP8:
            # of powers of two, so that the quotient is exact; 1 where there is no row
            own = tl.load(row_scale + row, mask=row < rows, other=0.0)
            factor = tl.where(row < rows, tl.div_rn(own, one), 1.0)
            scaled = value.to(tl.float32) * factor[:, None]
        else:
            scaled = tl.div_rn(value.to(tl.float32), one)
        scaled = tl.minimum(scaled, LARGEST_VALUE, propagate_nan=tl.PropagateNan.ALL)
        scaled = tl.maximum(scaled, -LARGEST_VALUE, propagate_nan=tl.PropagateNan.ALL)
        # padding stays zero even where the scale is not finite
        scaled = tl.where(inside, scaled, 0.0)
        written = (column < data_rows)[:, None] & (row < data_stride)[None, :]
        place = column.to(tl.int64)[:, None] * data_stride + row[None, :]
        tl.static_assert(place.dtype == tl.int64, "offsets in a matrix may pass 2**31")
        tl.store(data + place, tl.trans(scaled).to(data.dtype.element_ty), mask=written)


def launch_quantize_transposed(
    x: torch.Tensor, row_scale: torch.Tensor, dtype: torch.dtype, multiples: tuple[int, int] = (1, 1)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run :func:`fp8compile.ops.quantize_transposed` in one kernel.

    Args:
        x: ``[R, C]`` with contiguous rows: bfloat16, float16, float32, or FP8 data.
        row_scale: float32 ``[R, 1]``, powers of two. dtype: of the result. multiples: as in ``quantize``.

    Returns:
        FP8 data ``[C, R]``, sizes rounded up to ``multiples``, and the scale, float32 ``[1, 1]``.

    Raises:
        ValueError: for other shapes or strides.
    """
    if x.dim() != 2 or x.stride(1) != 1 or row_scale.shape != (x.shape[0], 1):
        raise ValueError(
            f"quantize_transposed: takes a matrix with contiguous rows and a scale per row, not shape {tuple(x.shape)} "
            f"with strides {tuple(x.stride())} and scales {tuple(row_scale.shape)}"
        )
    rows, columns = x.shape
    data_rows = multiples[0] * ceil_div(columns, multiples[0])
    data_stride = multiples[1] * ceil_div(rows, multiples[1])
    data = x.new_empty(data_rows, data_stride, dtype=dtype)
    scale = row_scale.new_empty(1, 1)
    tiles = ceil_div(data_stride, BLOCK_ROWS) * ceil_div(data_rows, BLOCK_COLUMNS)
    written = launch(
        quantize_transposed_kernel,
        min(max(tiles, 1), PROGRAMS) if isinstance(tiles, int) else PROGRAMS,  # one writes the scale
        {
            "x": x,
            "row_scale": row_scale.contiguous(),
            "data": data,
            "scale": scale,
            "rows": rows,
            "columns": columns,
            "row_stride": x.stride(0),
            "data_rows": data_rows,
            "data_stride": data_stride,
            "LARGEST_VALUE": LARGEST[dtype],
            "SMALLEST": SMALLEST_SCALE,
            "IS_FP8": x.dtype in LARGEST,
            "BLOCK_ROWS": BLOCK_ROWS,
            "BLOCK_COLUMNS": BLOCK_COLUMNS,
            "SCALES_AT_ONCE": SCALES_AT_ONCE,
        },
        writes=["data", "scale"],
        blocks={},
        num_warps=8,
        num_stages=1,
    )
    return written["data"], written["scale"]
