"""Quantize a matrix with scales for blocks: scales, data and transposed data from one read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8compile.formulas import SMALLEST_SCALE
from fp8compile.kernels.configs import ceil_div
from fp8compile.kernels.launch import launch
from fp8compile.recipe import BLOCK, LARGEST


@triton.jit
def scale_of_magnitudes(bits, LARGEST_VALUE: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """``max(amax / largest, smallest)`` of an amax whose bits these are; Inf and NaN stay."""
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), LARGEST_VALUE)
    scale = tl.where(scale < SMALLEST, SMALLEST, scale)
    if POWER_OF_TWO:
        rounded = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scale = tl.where(scale < float("inf"), rounded.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def quantized(x, scale, inside, LARGEST_VALUE: tl.constexpr, dtype: tl.constexpr):
    """``sat(round_nearest_even(x / scale))``; zero outside of the matrix, whatever the scale."""
    x = tl.div_rn(x, scale)
    x = tl.where(x > LARGEST_VALUE, LARGEST_VALUE, x)
    x = tl.where(x < -LARGEST_VALUE, -LARGEST_VALUE, x)
    return tl.where(inside, x, 0.0).to(dtype)


@triton.jit
def quantize_block_kernel(
    x, data, scale, transposed, transposed_scale,
    rows, columns, row_stride, data_rows, data_columns, transposed_rows, transposed_columns,
    LARGEST_VALUE: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of 128x128 a program. ``data`` and ``transposed`` may be None; SQUARE: one scale for all of a block,
    else one for each of its rows in ``data`` and for each of its columns in ``transposed``."""
    across = tl.cdiv(columns, BLOCK)
    down = tl.program_id(0) // across
    over = tl.program_id(0) % across
    row = down * BLOCK + tl.arange(0, BLOCK)
    column = over * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    source = row.to(tl.int64)[:, None] * row_stride + column[None, :]
    tl.static_assert(source.dtype == tl.int64, "offsets in a matrix may pass 2**31")
    value = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    # as integers magnitudes keep their order, and NaN is above Inf
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if SQUARE:
        by_block = scale_of_magnitudes(tl.max(tl.max(bits, axis=1), axis=0), LARGEST_VALUE, SMALLEST, POWER_OF_TWO)
        tl.store(scale + tl.program_id(0), by_block)
    if data is not None:
        if SQUARE:
            by_row = by_block
        else:
            row_scale = scale_of_magnitudes(tl.max(bits, axis=1), LARGEST_VALUE, SMALLEST, POWER_OF_TWO)
            tl.store(scale + row.to(tl.int64) * across + over, row_scale, mask=row < rows)
            by_row = row_scale[:, None]
        place = row.to(tl.int64)[:, None] * data_columns + column[None, :]
        tl.static_assert(place.dtype == tl.int64, "offsets in a matrix may pass 2**31")
        written = (row < data_rows)[:, None] & (column < data_columns)[None, :]
        tl.store(data + place, quantized(value, by_row, inside, LARGEST_VALUE, data.dtype.element_ty), mask=written)
    if transposed is not None:
        if SQUARE:
            by_column = by_block
        else:
            column_scale = scale_of_magnitudes(tl.max(bits, axis=0), LARGEST_VALUE, SMALLEST, POWER_OF_TWO)
            tl.store(transposed_scale + down.to(tl.int64) * columns + column, column_scale, mask=column < columns)
            by_column = column_scale[None, :]
        place = column.to(tl.int64)[:, None] * transposed_columns + row[None, :]
        tl.static_assert(place.dtype == tl.int64, "offsets in a matrix may pass 2**31")
        written = (column < transposed_rows)[:, None] & (row < transposed_columns)[None, :]
        turned = tl.trans(quantized(value, by_column, inside, LARGEST_VALUE, transposed.dtype.element_ty))
        tl.store(transposed + place, turned, mask=written)


def launch_quantize_block(
    x: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    square: bool,
    multiples: tuple[int, int] | None,
    transposed_multiples: tuple[int, int] | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Run :func:`fp8compile.ops.quantize_block` for one or both layouts in one kernel.

    Args:
        x: ``[R, C]``, neither zero, with contiguous rows: bfloat16, float16 or float32.
        dtype, power_of_two: as in ``quantize_block``.
        square: one scale for 128x128 elements; else for 128 along the contraction.
        multiples: as in ``quantize_block``, of the data ``[R, C]``, divisors of 128; None if those are not wanted.
        transposed_multiples: the same for the data ``[C, R]``.

    Returns:
        Data, their scales ``[R or ceil(R / 128), ceil(C / 128)]``, transposed data, and their scales
        ``[C or ceil(C / 128), ceil(R / 128)]``, not contiguous. None for what is not wanted.

    Raises:
        ValueError: for other shapes or strides.
    """
    if x.dim() != 2 or x.stride(1) != 1 or x.numel() == 0 or (multiples is None and transposed_multiples is None):
        raise ValueError(
            f"quantize_block: takes a matrix with contiguous rows, and writes at least one layout; not shape "
            f"{tuple(x.shape)} with strides {tuple(x.stride())}"
        )
    if any(BLOCK % step for step in (*(multiples or ()), *(transposed_multiples or ()))):
        raise ValueError(f"quantize_block: {multiples} and {transposed_multiples} must divide {BLOCK}")
    rows, columns = x.shape
    down, across = ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)
    sizes = [_padded(x.shape, multiples), _padded((columns, rows), transposed_multiples)]
    made: dict[str, torch.Tensor | None] = {
        "data": x.new_empty(sizes[0], dtype=dtype) if multiples else None,
        "transposed": x.new_empty(sizes[1], dtype=dtype) if transposed_multiples else None,
        "scale": None,
        "transposed_scale": None,
    }
    if square or multiples:
        made["scale"] = x.new_empty(down if square else rows, across, dtype=torch.float32)
    if transposed_multiples and not square:
        made["transposed_scale"] = x.new_empty(down, columns, dtype=torch.float32)
    written = launch(
        quantize_block_kernel,
        down * across,
        {
            "x": x,
            **made,
            "rows": rows,
            "columns": columns,
            "row_stride": x.stride(0),
            "data_rows": sizes[0][0],
            "data_columns": sizes[0][1],
            "transposed_rows": sizes[1][0],
            "transposed_columns": sizes[1][1],
            "LARGEST_VALUE": LARGEST[dtype],
            "SMALLEST": SMALLEST_SCALE,
            "POWER_OF_TWO": power_of_two,
            "SQUARE": square,
            "BLOCK": BLOCK,
        },
        writes=[name for name, tensor in made.items() if tensor is not None],
        blocks={},
        num_warps=8,
        num_stages=1,
    )
    scale, turned = written.get("scale"), written.get("scale" if square else "transposed_scale")
    return (
        written.get("data"),
        scale if multiples else None,
        written.get("transposed"),
        turned.permute(1, 0) if turned is not None and transposed_multiples else None,
    )


def _padded(shape: tuple[int, ...] | torch.Size, multiples: tuple[int, int] | None) -> tuple[int, int]:
    """The sizes of data of ``shape`` whose sizes are multiples of these."""
    rows, columns = (step * ceil_div(size, step) for size, step in zip(shape, multiples or (1, 1), strict=True))
    return rows, columns
