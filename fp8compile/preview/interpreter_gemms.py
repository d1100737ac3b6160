"""What a wrapper calls besides Triton kernels: GEMMs, those in FP8 as references that run on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp8compile import formulas

aten = torch.ops.aten


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``aten._scaled_mm`` with scales of size 1 or per row of ``a`` and column of ``b``: :func:`formulas.scaled_mm`.

    Shapes: a (M, K) and b (K, N) float8; scale_a 1 element or (M, 1), scale_b 1 element or (1, N), float32; bias (N,).
    """
    for name, scale, dim, size in (("scale_a", scale_a, 0, a.shape[0]), ("scale_b", scale_b, 1, b.shape[1])):
        if scale.numel() != 1 and (scale.numel() != size or scale.shape[dim] != size):
            raise NotImplementedError(f"_scaled_mm: {name} of shape {tuple(scale.shape)} for a side of {size}")
    if scale_result is not None:
        raise NotImplementedError("_scaled_mm: scale_result")
    rows, columns = (scale.reshape(-1, 1) for scale in (scale_a, scale_b))
    dtype = out_dtype or (a.dtype if out is None else out.dtype)
    result = formulas.scaled_mm(formulas.apply, a, b.t(), rows, columns, bias, dtype, 2)
    return result if out is None else out.copy_(result)


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``aten._scaled_grouped_mm`` where the groups are rows of ``a``, each multiplied with its own matrix.

    Shapes: a (M, K), b (G, K, N) float8; scale_a (M,), scale_b (G, N) float32; offs (G,) int32, the groups' ends.
    Rows behind the last group are zero.
    """
    if a.dim() != 2 or b.dim() != 3 or offs is None or bias is not None or scale_result is not None:
        raise NotImplementedError(f"_scaled_grouped_mm of {tuple(a.shape)} and {tuple(b.shape)}: only groups of rows")
    dtype = out_dtype or torch.bfloat16
    result = a.new_zeros((a.shape[0], b.shape[2]), dtype=dtype)
    ends = offs.tolist()
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        rows = slice(start, end)
        result[rows] = scaled_mm(a[rows], b[group], scale_a[rows, None], scale_b[group, None], out_dtype=dtype)
    return result if out is None else out.copy_(result)


class ExternKernels:
    """Stands in for Inductor's ``extern_kernels``: FP8 products from this module, all others from ``torch.ops.aten``.

    ATen's own CPU ``_scaled_mm`` takes some scales and output types only.
    """

    _scaled_mm = staticmethod(scaled_mm)
    _scaled_grouped_mm = staticmethod(scaled_grouped_mm)

    @staticmethod
    def bias_addmm(
        bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, alpha: float = 1, beta: float = 1
    ) -> torch.Tensor:
        return torch.addmm(bias, a, b, out=out, alpha=alpha, beta=beta)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(aten, name)


@contextlib.contextmanager
def fp8_operators() -> Iterator[None]:
    """Direct calls of ATen's FP8 products, as a wrapper makes them for fallbacks, take CPU tensors too."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_grouped_mm", scaled_grouped_mm, "CPU")
        library.impl("_scaled_mm", scaled_mm, "CPU")
        yield
