"""The arithmetic of FP8, written once.

Each formula is a function of ``call``, which applies an ATen operator: to tensors in the CPU reference
(:func:`apply`), to graph nodes when a graph is lowered for Inductor. Both therefore compute the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8compile.recipe import BLOCK, LARGEST

aten = torch.ops.aten
prims = torch.ops.prims

Call = Callable[..., Any]

SMALLEST_SCALE = 2.0**-126
"""Scales are at least float32's smallest normal number: never zero, and with a finite reciprocal."""


def apply(operator: Call, *args: Any) -> Any:
    """The ``call`` that computes."""
    return operator(*args)


def cast(call: Call, x: Any, dtype: torch.dtype) -> Any:
    return call(prims.convert_element_type.default, x, dtype)


def compute_scale(call: Call, x: Any, dims: Sequence[int], dtype: torch.dtype, power_of_two: bool) -> Any:
    """``max(amax / largest(dtype), 2**-126)`` over ``dims``, float32, reduced dimensions kept with size 1.

    A NaN or Inf in a group gives that group a NaN or Inf scale, which is how non-finite values survive quantization.
    """
    return scale_of_amax(
        call, call(aten.amax.default, call(aten.abs.default, x), list(dims), True), dtype, power_of_two
    )


def scale_of_amax(call: Call, amax: Any, dtype: torch.dtype, power_of_two: bool) -> Any:
    """``max(amax / largest(dtype), 2**-126)`` in float32, if wished rounded up to a power of two."""
    scale = call(aten.div.Tensor, cast(call, amax, torch.float32), LARGEST[dtype])
    scale = call(aten.clamp_min.default, scale, SMALLEST_SCALE)
    return round_up_to_power_of_two(call, scale) if power_of_two else scale


def compute_block_scale(
    call: Call, x: Any, shape: Sequence[Any], block: Sequence[int], dtype: torch.dtype, power_of_two: bool
) -> Any:
    """:func:`compute_scale` of each ``block`` of a matrix; one at the edge counts only the elements that it has.

    Returns:
        float32, ``shape`` divided by ``block`` and rounded up.
    """
    amax = call(aten.amax.default, call(aten.abs.default, _in_blocks(call, x, shape, block)), [1, 3])
    return scale_of_amax(call, amax, dtype, power_of_two)


def quantize_block(
    call: Call, x: Any, scale: Any, shape: Sequence[Any], block: Sequence[int], dtype: torch.dtype
) -> Any:
    """:func:`quantize` of a matrix with the scale of each ``block``."""
    (down, across), (rows, columns) = _blocks(shape, block), block
    scales = call(aten.reshape.default, scale, [down, 1, across, 1])
    data = quantize(call, _in_blocks(call, x, shape, block), scales, dtype)
    whole = call(aten.reshape.default, data, [rows * down if down != -1 else -1, across * columns])
    return _cut(call, whole, shape)


def _in_blocks(call: Call, x: Any, shape: Sequence[Any], block: Sequence[int]) -> Any:
    """A matrix, with zeros up to whole blocks, as ``[blocks down, rows of one, blocks across, columns of one]``."""
    missing = [-size % step if step > 1 else 0 for size, step in zip(shape, block, strict=True)]
    if any(missing):
        x = call(aten.constant_pad_nd.default, x, [0, missing[1], 0, missing[0]], 0.0)
    (down, across), (rows, columns) = _blocks(shape, block), block
    return call(aten.reshape.default, x, [down, rows, across, columns])


def _blocks(shape: Sequence[Any], block: Sequence[int]) -> list[int]:
    """How many blocks a matrix has down and across; -1, for a view, of a dynamic size, whose blocks are single rows."""
    return [-(-size // step) if isinstance(size, int) else -1 for size, step in zip(shape, block, strict=True)]


def _cut(call: Call, x: Any, shape: Sequence[Any]) -> Any:
    """The corner of ``x`` with ``shape``; a dynamic size is x's own."""
    for dim, size in enumerate(shape):
        if isinstance(size, int):
            x = call(aten.slice.Tensor, x, dim, 0, size)
    return x


def round_up_to_power_of_two(call: Call, scale: Any) -> Any:
    """The smallest power of two that is not below a positive normal float32; Inf and NaN stay.

    Adding the largest mantissa carries into the exponent unless the mantissa is zero.
    """
    bits = call(aten.view.dtype, scale, torch.int32)
    carried = call(aten.add.Tensor, bits, 0x007FFFFF)
    rounded = call(aten.view.dtype, call(aten.bitwise_and.Scalar, carried, 0x7F800000), torch.float32)
    finite = call(aten.lt.Scalar, scale, float("inf"))
    return call(aten.where.self, finite, rounded, scale)


def quantize(call: Call, x: Any, scale: Any, dtype: torch.dtype) -> Any:
    """``sat(round_nearest_even(x / scale))``. NaN stays NaN; a division by an infinite scale gives NaN or 0."""
    return saturate(call, call(aten.div.Tensor, cast(call, x, torch.float32), scale), dtype)


def saturate(call: Call, scaled: Any, dtype: torch.dtype) -> Any:
    """Round to ``dtype``, values beyond its largest to its largest."""
    largest = LARGEST[dtype]
    clamped = call(aten.clamp_max.default, call(aten.clamp_min.default, scaled, -largest), largest)
    return cast(call, clamped, dtype)


def quantize_transposed(call: Call, x: Any, row_scale: Any, dtype: torch.dtype, rank: int, is_fp8: bool) -> Any:
    """``x`` (or what FP8 data and ``row_scale`` stand for) transposed, with one scale: the largest of its rows.

    With scales that are powers of two the factor between them is exact.

    Returns:
        (data, scale), the scale with one element.
    """
    scale = call(aten.amax.default, row_scale, list(range(rank)), True)
    scaled = cast(call, x, torch.float32)
    if is_fp8:
        scaled = call(aten.mul.Tensor, scaled, call(aten.div.Tensor, row_scale, scale))
    else:
        scaled = call(aten.div.Tensor, scaled, scale)
    data = saturate(call, scaled, dtype)
    return call(aten.permute.default, data, [*range(rank - 2), rank - 1, rank - 2]), scale


def scaled_mm(
    call: Call, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out_dtype: torch.dtype, rank: int
) -> Any:
    """``(a @ bᵀ) · scale_a · scale_bᵀ + bias`` with products and sums in float32.

    The scales are applied one after the other: their product alone could underflow.
    """
    matmul, transposed = (aten.mm.default, [1, 0]) if rank == 2 else (aten.bmm.default, [0, 2, 1])
    wide_a, wide_b = cast(call, a, torch.float32), cast(call, b, torch.float32)
    out = call(matmul, wide_a, call(aten.permute.default, wide_b, transposed))
    out = call(aten.mul.Tensor, out, scale_a)
    out = call(aten.mul.Tensor, out, call(aten.permute.default, scale_b, transposed))
    if bias is not None:
        out = call(aten.add.Tensor, out, cast(call, bias, torch.float32))
    return cast(call, out, out_dtype)


def block_scaled_mm(
    call: Call, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, shapes: Sequence[Any], out_dtype: torch.dtype
) -> Any:
    """``(a * scale_a) @ (b * scale_b)ᵀ + bias`` in float32, each scale for a block of 128 along K; ``shapes``: of a, b
    and their scales."""
    wide = [
        call(aten.mul.Tensor, cast(call, data, torch.float32), _by_element(call, scale, shape, counts))
        for data, scale, shape, counts in ((a, scale_a, shapes[0], shapes[2]), (b, scale_b, shapes[1], shapes[3]))
    ]
    out = call(aten.mm.default, wide[0], call(aten.permute.default, wide[1], [1, 0]))
    if bias is not None:
        out = call(aten.add.Tensor, out, cast(call, bias, torch.float32))
    return cast(call, out, out_dtype)


def _by_element(call: Call, scale: Any, shape: Sequence[Any], counts: Sequence[Any]) -> Any:
    """The scale of each element of a matrix of ``shape`` that has ``counts`` blocks."""
    rows = rows_per_scale(shape[0], counts[0])
    down, across = _blocks(counts, (1, 1))
    single = call(aten.reshape.default, scale, [down, 1, across, 1])
    repeated = call(aten.expand.default, single, [-1, rows, -1, BLOCK])
    whole = call(aten.reshape.default, repeated, [rows * down if down != -1 else -1, across * BLOCK])
    return _cut(call, whole, shape)


def rows_per_scale(rows: Any, count: Any) -> int:
    """1 where each of ``rows`` has scales of its own, else :data:`fp8compile.recipe.BLOCK`."""
    return 1 if not isinstance(rows, int) or rows == count else BLOCK
