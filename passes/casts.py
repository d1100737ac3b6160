"""Which casts a set of FP8 matmuls needs, and which of them are the same cast.

An operand is traced back through views, transposes and dtype conversions to the tensor it shows. What remains is a
*matrix* (the operand, or its transpose, as a view of that tensor) and how the GEMM wants to read it. Casts are equal
when the matrix, the cast and the layout are.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from fp8compile.passes.context import FoundMatmul
from fp8compile.passes.dataflow import Step, is_transposed, root, size_hint, steps, value, with_transposition
from fp8compile.recipe import BLOCK, Cast


@dataclass(frozen=True)
class CastPlan:
    """One operand of one FP8 GEMM.

    Attributes:
        operand: the node the matmul reads.
        source: the tensor it is a view of, before any conversion. views: how it gets from there to the matrix.
        transpose: whether the GEMM reads the matrix transposed.
        flipped: whether the matrix is the operand transposed.
        dims: of the matrix, the dimensions that share a scale. block: instead, rows and columns that do.
        cast: dtype and scale rule.
        multiples: what rows and columns of the data are padded to.
    """

    operand: torch.fx.Node
    source: torch.fx.Node
    views: tuple[Step, ...]
    transpose: bool
    flipped: bool
    dims: tuple[int, ...]
    cast: Cast
    multiples: tuple[int, int]
    block: tuple[int, int] | None = None

    @property
    def matrix_key(self) -> tuple[Any, ...]:
        return (self.source, *((kind, argument) for kind, argument, _ in self.views))

    @property
    def scale_key(self) -> tuple[Any, ...]:
        return (self.matrix_key, self.dims, self.block, self.cast.dtype, self.cast.power_of_two)

    @property
    def data_key(self) -> tuple[Any, ...]:
        return (self.scale_key, self.transpose, self.multiples)

    @property
    def layout_key(self) -> tuple[Any, ...]:
        """The data key without the source, which is renamed when a matmul that makes it is replaced."""
        views = tuple((kind, argument) for kind, argument, _ in self.views)
        return (views, self.dims, self.block, self.cast, self.transpose, self.multiples)

    @property
    def brings_to_one_scale(self) -> bool:
        """Whether the GEMM sums over what has scales of its own, so that the data need one scale instead."""
        return self.cast.granularity == "rowwise_once" and self.transpose

    @property
    def as_it_lies(self) -> CastPlan:
        """The cast of the same matrix that a GEMM summing over its last dimension reads."""
        return dataclasses.replace(self, transpose=False, multiples=(1, 1))

    @property
    def elements(self) -> int:
        return math.prod(size_hint(size) for size in value(self.operand).shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element of what the cast reads."""
        return value(self.source).dtype.itemsize


def plan_casts(found: FoundMatmul, alignment: int) -> tuple[CastPlan, CastPlan]:
    """The casts of both operands of a matmul that is to run in FP8."""
    gemm = found.gemm
    assert gemm is not None
    assert found.first is not None
    assert found.second is not None
    sums_over_rows = found.site.role == "wgrad"
    (first, second), align = found.site.operands, alignment
    return (
        _plan(found.first, gemm.first, -1, (1, align), None if first == "weight" else sums_over_rows),
        _plan(found.second, gemm.second, -2, (align, align), None if second == "weight" else sums_over_rows),
    )


def _plan(
    operand: torch.fx.Node, cast: Cast, contraction: int, multiples: tuple[int, int], sums_over_rows: bool | None
) -> CastPlan:
    """``sums_over_rows``: whether the rows that have scales of their own, if one cast is for both layouts, are what
    this GEMM sums over; None, for a weight: they are as they lie in memory."""
    kept, contracted = [value(operand).shape[d] for d in ((-2, -1) if contraction == -1 else (-1, -2))]
    needed = (_unless_divides(multiples[0], kept), _unless_divides(multiples[1], contracted))
    rank = value(operand).dim()
    views, as_read = steps(operand), contraction == -1
    lies_transposed = bool(views) and is_transposed(views[-1])
    transpose = as_read == lies_transposed
    if cast.granularity == "rowwise_once" and sums_over_rows not in (None, transpose):
        transpose = not transpose
        views = views if lies_transposed else with_transposition(views, rank)
    elif lies_transposed:
        views = views[:-1]
    dims = {
        "tensorwise": tuple(range(rank)),
        "rowwise": (rank - 2 if transpose else rank - 1,),
        "rowwise_once": (rank - 1,),
        "block": (),
    }[cast.granularity]
    block = None
    if cast.granularity == "block":
        block = (BLOCK, BLOCK) if sums_over_rows is None else (BLOCK, 1) if transpose else (1, BLOCK)
    flipped = transpose == as_read
    return CastPlan(operand, root(operand), tuple(views), transpose, flipped, dims, cast, needed, block)


def _unless_divides(multiple: int, size: int | torch.SymInt) -> int:
    """``multiple``, or 1 if ``size`` is known to be one of it."""
    return 1 if isinstance(size, int) and size % multiple == 0 else multiple
