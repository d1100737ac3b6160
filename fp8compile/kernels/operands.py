"""What the GEMM launchers ask of operands and scales, and how the kernels see them."""

from __future__ import annotations

from typing import Any

import torch

from fp8compile.hardware import CHIPS


def operand_rows(name: str, x: torch.Tensor) -> torch.Tensor:
    """``[..., R, K]`` as ``[rows, K]`` that TMA can read.

    Raises:
        ValueError: if the layout cannot be read, with the reason.
    """
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        raise ValueError(f"{name}: strides {tuple(x.stride())}; FP8 operands lie with the contraction (K) last")
    if flat.stride(0) % 16:
        raise ValueError(f"{name}: row stride {flat.stride(0)}; TMA reads rows that start at multiples of 16 bytes")
    return flat


def zeros(like: torch.Tensor, *shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the device of ``like``, by an operator that Inductor also takes after its decompositions."""
    return torch.full(shape, 0.0, dtype=dtype, device=like.device)


def check_dtypes(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> None:
    """Refuse operands that Hopper does not multiply, and scales that are not float32."""
    if reason := CHIPS["h100"].refuses(a.dtype, b.dtype):
        raise ValueError(f"scaled_mm: {reason}")
    for scale in scales:
        if scale.dtype != torch.float32:
            raise ValueError(f"scaled_mm: scales are float32, not {scale.dtype}")


def flat_scale(name: str, scale: torch.Tensor, batch: Any, rows: Any) -> tuple[torch.Tensor, bool, Any]:
    """A contiguous scale, whether it has one value for each row, and how far apart those of two matrices lie.

    Args:
        name: for errors. scale: ``[batch or 1 or nothing, rows or 1, 1]``, or a single value of any shape.
    """
    per_matrix = scale.shape[-2] if scale.dim() >= 2 else 1
    matrices = scale.shape[0] if scale.dim() == 3 else 1
    if per_matrix not in (rows, 1) or matrices not in (batch, 1) or scale.numel() != per_matrix * matrices:
        raise ValueError(f"{name}: shape {tuple(scale.shape)} is neither one scale nor one for each of {rows} rows")
    return scale.contiguous(), not _is_one(per_matrix), 0 if _is_one(matrices) else per_matrix


def _is_one(size: Any) -> bool:
    """Dynamic sizes count as others: what is right for any size is right for 1 too, and needs no guard."""
    return isinstance(size, int) and size == 1
