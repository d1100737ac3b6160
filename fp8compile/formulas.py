"""The arithmetic of FP8, written once.

Each formula is a function of ``call``, which applies an ATen operator: to tensors in the CPU reference
(:func:`apply`), to graph nodes when a graph is lowered for Inductor. Both therefore compute the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8compile.recipe import LARGEST

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
    amax = call(aten.amax.default, call(aten.abs.default, x), list(dims), True)
    scale = call(aten.div.Tensor, cast(call, amax, torch.float32), LARGEST[dtype])
    scale = call(aten.clamp_min.default, scale, SMALLEST_SCALE)
    return round_up_to_power_of_two(call, scale) if power_of_two else scale


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
