"""The operators of a rewritten graph, ``torch.ops.fp8compile.*``: schema, shape rule and reference kernel.

They are what a dumped graph consists of, they run on any device, and they are what the lower pass turns into kernels.
All matrices may have one batch dimension in front. Both operands of ``scaled_mm`` lie with the contraction last
(K-major), which is what Hopper's FP8 tensor cores read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8compile import formulas
from fp8compile.formulas import aten
from fp8compile.recipe import LARGEST

_LIBRARY = torch.library.Library("fp8compile", "DEF")


def padded_size(size: Any, multiple: int) -> Any:
    """``size`` rounded up to a multiple; works on ``int`` and ``SymInt``."""
    return size if multiple == 1 else (size + multiple - 1) // multiple * multiple


_LIBRARY.define(
    "compute_scale(Tensor x, int[] dims, ScalarType dtype, bool power_of_two) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
_LIBRARY.define(
    "quantize(Tensor x, Tensor scale, ScalarType dtype, bool transpose, int[2] multiples) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
_LIBRARY.define(
    "quantize_transposed(Tensor x, Tensor row_scale, ScalarType dtype, int[2] multiples) -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_LIBRARY.define(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, bool fast)"
    " -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
_LIBRARY.define(
    "scaled_grouped_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offsets, ScalarType out_dtype, "
    "bool fast) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
_LIBRARY.define(
    "quantize_block(Tensor x, int[2] block, ScalarType dtype, bool power_of_two, bool transpose, int[2] multiples)"
    " -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_LIBRARY.define(
    "block_scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)


@torch.library.impl(_LIBRARY, "compute_scale", "CompositeExplicitAutograd")
def compute_scale(x: torch.Tensor, dims: Sequence[int], dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    """The scale of ``x`` for ``dtype``, one for each group of elements along ``dims``.

    Args:
        x: any float tensor.
        dims: dimensions that share a scale; they are kept with size 1.
        dtype: an FP8 dtype. power_of_two: round up to powers of two.

    Returns:
        float32, ``max(amax(|x|) / largest(dtype), 2**-126)``; not finite where the group is not.
    """
    if any(x.shape[dim] == 0 for dim in dims):  # the amax of nothing is zero
        shape = [1 if dim in [d % x.dim() for d in dims] else size for dim, size in enumerate(x.shape)]
        return x.new_full(shape, formulas.SMALLEST_SCALE, dtype=torch.float32)
    return formulas.compute_scale(formulas.apply, x, dims, dtype, power_of_two)


@torch.library.impl(_LIBRARY, "quantize", "CompositeExplicitAutograd")
def quantize(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, transpose: bool, multiples: Sequence[int]
) -> torch.Tensor:
    """``sat(round_nearest_even(x / scale))``, laid out for a GEMM.

    Args:
        x: ``[..., R, C]``, any strides. scale: float32, broadcastable to ``x``. dtype: an FP8 dtype.
        transpose: write ``[..., C, R]``.
        multiples: round the last two sizes of the result up to these multiples, filling with zeros.

    Returns:
        Contiguous FP8 data; ``data * scale ≈ x``.
    """
    data = formulas.quantize(formulas.apply, x, scale, dtype)
    return _laid_out(data.mT if transpose else data, dtype, multiples)


def _laid_out(data: torch.Tensor, dtype: torch.dtype, multiples: Sequence[int]) -> torch.Tensor:
    """Contiguous, the last two sizes rounded up."""
    rows, columns = (padded_size(size, m) - size for size, m in zip(data.shape[-2:], multiples, strict=True))
    if rows or columns:
        data = aten.constant_pad_nd.default(data.contiguous().view(torch.uint8), [0, columns, 0, rows], 0).view(dtype)
    return data.clone(memory_format=torch.contiguous_format)


@torch.library.impl(_LIBRARY, "quantize_transposed", "CompositeExplicitAutograd")
def quantize_transposed(
    x: torch.Tensor, row_scale: torch.Tensor, dtype: torch.dtype, multiples: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix transposed and in FP8 with one scale, for a GEMM that sums over its rows.

    Args:
        x: ``[..., R, C]``, high precision, or FP8 data that ``row_scale`` takes back.
        row_scale: float32 ``[..., R, 1]``, powers of two.
        dtype: an FP8 dtype. multiples: as in :func:`quantize`, of the result.

    Returns:
        Data ``[..., C, R]``, contiguous, and the largest of ``row_scale``, float32 with as many dimensions, all of
        size 1.
    """
    if row_scale.numel() == 0:  # the scale of nothing, as compute_scale has it
        row_scale = row_scale.new_full([1] * x.dim(), formulas.SMALLEST_SCALE)
    data, scale = formulas.quantize_transposed(formulas.apply, x, row_scale, dtype, x.dim(), x.dtype in LARGEST)
    return _laid_out(data, dtype, multiples), scale


@torch.library.impl(_LIBRARY, "scaled_mm", "CompositeExplicitAutograd")
def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """``(a * scale_a) @ (b * scale_b)ᵀ + bias``.

    Args:
        a: FP8 ``[..., M, K]``. b: FP8 ``[..., N, K]``.
        scale_a: float32 ``[..., M or 1, 1]``. scale_b: float32 ``[..., N or 1, 1]``.
        bias: ``[N]``, added before rounding.
        out_dtype: of the result ``[..., M, N]``.
        fast: sums may stay in the tensor core's accumulator. The reference always sums in float32.
    """
    return formulas.scaled_mm(formulas.apply, a, b, scale_a, scale_b, bias, out_dtype, a.dim())


@torch.library.impl(_LIBRARY, "scaled_grouped_mm", "CompositeExplicitAutograd")
def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """``scaled_mm`` of consecutive rows of ``a`` with one matrix of ``b`` each (a mixture of experts).

    Args:
        a: FP8 ``[T, K]``. b: FP8 ``[E, N, K]``.
        scale_a: float32 ``[T or 1, 1]``. scale_b: float32 ``[E or 1, N or 1, 1]``.
        offsets: int32 ``[E]``, where each group of rows ends; groups may be empty.
        out_dtype: of the result ``[T, N]``; rows behind the last group are zero.
        fast: as in :func:`scaled_mm`.
    """
    out = a.new_zeros(a.shape[0], b.shape[1], dtype=out_dtype)
    scale_a, scale_b = scale_a.expand(a.shape[0], 1), scale_b.expand(*b.shape[:2], 1)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        rows = slice(start, end)
        out[rows] = scaled_mm(a[rows], b[expert], scale_a[rows], scale_b[expert], None, out_dtype, fast)
        start = end
    return out


@torch.library.impl(_LIBRARY, "quantize_block", "CompositeExplicitAutograd")
def quantize_block(
    x: torch.Tensor,
    block: Sequence[int],
    dtype: torch.dtype,
    power_of_two: bool,
    transpose: bool,
    multiples: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in FP8 with one scale for every block.

    Args:
        x: ``[R, C]``, any strides.
        block: rows and columns that share a scale, each 1 or 128; a block at the edge is what there is of it.
        dtype, power_of_two: as in :func:`compute_scale`. transpose, multiples: as in :func:`quantize`.

    Returns:
        Data as of :func:`quantize`, and scales, float32 ``[ceil(R / block[0]), ceil(C / block[1])]``, contiguous and
        then transposed as the data are.
    """
    scale = formulas.compute_block_scale(formulas.apply, x, x.shape, block, dtype, power_of_two).contiguous()
    data = formulas.quantize_block(formulas.apply, x, scale, x.shape, block, dtype)
    data, scale = (data.mT, scale.mT) if transpose else (data, scale)
    return _laid_out(data, dtype, multiples), scale


@torch.library.impl(_LIBRARY, "block_scaled_mm", "CompositeExplicitAutograd")
def block_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``(a * scale_a) @ (b * scale_b)ᵀ + bias``, a scale for every 128 along K.

    Args:
        a: FP8 ``[M, K]``. b: FP8 ``[N, K]``.
        scale_a: float32 ``[M, ceil(K / 128)]``, or ``[ceil(M / 128), ceil(K / 128)]``. scale_b: the same for ``b``.
        bias: ``[N]``, added before rounding.
        out_dtype: of the result ``[M, N]``. Sums are float32.
    """
    shapes = (a.shape, b.shape, scale_a.shape, scale_b.shape)
    return formulas.block_scaled_mm(formulas.apply, a, b, scale_a, scale_b, bias, shapes, out_dtype)


def _scale_shape(x: torch.Tensor, dims: Sequence[int], *_: Any) -> tuple[list[Any], torch.dtype]:
    reduced = {dim % x.dim() for dim in dims}
    return [1 if dim in reduced else size for dim, size in enumerate(x.shape)], torch.float32


def _data_shape(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, transpose: bool, multiples: Sequence[int]
) -> tuple[list[Any], torch.dtype]:
    *batch, rows, columns = x.shape
    rows, columns = (columns, rows) if transpose else (rows, columns)
    return [*batch, padded_size(rows, multiples[0]), padded_size(columns, multiples[1])], dtype


def _block_product_shape(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> tuple[list[Any], torch.dtype]:
    return [a.shape[0], b.shape[0]], rest[-1]


def _product_shape(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> tuple[list[Any], torch.dtype]:
    return [*a.shape[:-1], b.shape[-2]], rest[-2]


COMPUTE_SCALE = torch.ops.fp8compile.compute_scale.default
QUANTIZE = torch.ops.fp8compile.quantize.default
QUANTIZE_TRANSPOSED = torch.ops.fp8compile.quantize_transposed.default
SCALED_MM = torch.ops.fp8compile.scaled_mm.default
SCALED_GROUPED_MM = torch.ops.fp8compile.scaled_grouped_mm.default
QUANTIZE_BLOCK = torch.ops.fp8compile.quantize_block.default
BLOCK_SCALED_MM = torch.ops.fp8compile.block_scaled_mm.default

CASTS = (COMPUTE_SCALE, QUANTIZE, QUANTIZE_TRANSPOSED, QUANTIZE_BLOCK)
GEMMS = (SCALED_MM, SCALED_GROUPED_MM, BLOCK_SCALED_MM)

SHAPE_RULES: dict[Any, Callable[..., tuple[list[Any], torch.dtype]]] = {
    COMPUTE_SCALE: _scale_shape,
    QUANTIZE: _data_shape,
    SCALED_MM: _product_shape,
    SCALED_GROUPED_MM: _product_shape,
    BLOCK_SCALED_MM: _block_product_shape,
}
"""Shape and dtype of each operator's result, which is contiguous, from its arguments."""


def _register_shape_rule(op: Any, rule: Callable[..., tuple[list[Any], torch.dtype]]) -> None:
    def fake(*args: Any) -> torch.Tensor:
        shape, dtype = rule(*args)
        first: torch.Tensor = args[0]
        return first.new_empty(shape, dtype=dtype)

    torch.library.register_fake(op.name().removesuffix(".default"), fake, lib=_LIBRARY)


for _op, _rule in SHAPE_RULES.items():
    _register_shape_rule(_op, _rule)


@torch.library.register_fake("fp8compile::quantize_transposed", lib=_LIBRARY)
def _quantize_transposed_shapes(
    x: torch.Tensor, row_scale: torch.Tensor, dtype: torch.dtype, multiples: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, _ = _data_shape(x, row_scale, dtype, True, multiples)
    return x.new_empty(shape, dtype=dtype), row_scale.new_empty([1] * x.dim())


@torch.library.register_fake("fp8compile::quantize_block", lib=_LIBRARY)
def _quantize_block_shapes(
    x: torch.Tensor,
    block: Sequence[int],
    dtype: torch.dtype,
    power_of_two: bool,
    transpose: bool,
    multiples: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, _ = _data_shape(x, x, dtype, transpose, multiples)
    counts = [(size + step - 1) // step for size, step in zip(x.shape, block, strict=True)]
    scales = x.new_empty(counts, dtype=torch.float32)
    return x.new_empty(shape, dtype=dtype), scales.mT if transpose else scales
