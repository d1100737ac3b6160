"""``(a * scale_a) @ (b * scale_b)ᵀ`` with an epilogue: a persistent Triton kernel for Hopper, its launcher, its op."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8compile.kernels.configs import (
    PROGRAMS,
    SUM_SPLITS,
    TileConfig,
    ceil_div,
    choose_config,
    choose_split,
    hint,
)
from fp8compile.kernels.epilogue import finish_tile
from fp8compile.kernels.launch import launch
from fp8compile.kernels.operands import check_dtypes, flat_scale, operand_rows, zeros
from fp8compile.kernels.tiles import multiply_tiles, tile_position
from fp8compile.recipe import LARGEST

ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")


@triton.jit
def scaled_mm_kernel(
    out, scale_a, scale_b, bias, residual, preactivation, out_scale, amax,
    BATCH, M, N, K, SCALE_A_STEP, SCALE_B_STEP, a, b,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
    SWAPPED: tl.constexpr, FAST: tl.constexpr, BY_ROW_A: tl.constexpr, BY_ROW_B: tl.constexpr,
    ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    k_blocks = tl.cdiv(K, BLOCK_K)
    blocks_per_split = tl.cdiv(k_blocks, SPLIT_K)
    for tile in tl.range(tl.program_id(0), BATCH * SPLIT_K * m_tiles * n_tiles, tl.num_programs(0), flatten=True):
        part = tile // (m_tiles * n_tiles)
        batch = part // SPLIT_K
        m_tile, n_tile = tile_position(tile % (m_tiles * n_tiles), m_tiles, n_tiles, GROUP_M)
        first_k = part % SPLIT_K * blocks_per_split
        sums = multiply_tiles(
            a, b, batch * M + m_tile * BLOCK_M, batch * N + n_tile * BLOCK_N,
            first_k, tl.minimum(first_k + blocks_per_split, k_blocks),
            BLOCK_M, BLOCK_N, BLOCK_K, SWAPPED, FAST,
        )  # fmt: skip
        if SPLIT_K == 1:
            finish_tile(
                sums, m_tile * BLOCK_M, n_tile * BLOCK_N, batch.to(tl.int64) * M, M, N,
                out, scale_a + batch * SCALE_A_STEP, scale_b + batch * SCALE_B_STEP,
                bias, residual, preactivation, out_scale, amax, BY_ROW_A, BY_ROW_B, ACTIVATION, COLUMNS,
            )  # fmt: skip
        else:
            finish_tile(
                sums, m_tile * BLOCK_M, n_tile * BLOCK_N, part.to(tl.int64) * M, M, N,
                out, None, None, None, None, None, None, None, False, False, "none", COLUMNS,
            )  # fmt: skip


@triton.jit
def sum_splits_kernel(
    partials, out, scale_a, scale_b, bias, residual, preactivation, out_scale, amax,
    M, N, SCALE_A_STEP, SCALE_B_STEP,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
    BY_ROW_A: tl.constexpr, BY_ROW_B: tl.constexpr, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum ``partials`` ``[BATCH, SPLIT_K, M, N]`` in order, and finish."""
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    batch = tile // (m_tiles * n_tiles)
    row = tile // n_tiles % m_tiles * BLOCK_M
    column = tile % n_tiles * BLOCK_N
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for split in tl.static_range(SPLIT_K):
        first_row = (batch * SPLIT_K + split).to(tl.int64) * M
        offsets = (first_row + rows)[:, None] * N + columns[None, :]
        tl.static_assert(offsets.dtype == tl.int64, "offsets in a matrix may pass 2**31")
        sums += tl.load(partials + offsets, mask=inside, other=0.0)
    finish_tile(
        sums, row, column, batch.to(tl.int64) * M, M, N,
        out, scale_a + batch * SCALE_A_STEP, scale_b + batch * SCALE_B_STEP,
        bias, residual, preactivation, out_scale, amax, BY_ROW_A, BY_ROW_B, ACTIVATION, COLUMNS,
    )  # fmt: skip


def check_epilogue(
    out: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    preactivation: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> None:
    """Refuse what does not fit the result or is not known."""
    if (out.dtype in LARGEST) != (out_scale is not None):
        raise ValueError(f"out_scale: {'needed' if out_scale is None else 'not used'} for a result in {out.dtype}")
    if activation not in ACTIVATIONS or (preactivation is not None and activation == "none"):
        raise ValueError(f"activation: {activation!r}; use one of {', '.join(ACTIVATIONS)}, and one with preactivation")
    for name, like in (("residual", residual), ("preactivation", preactivation)):
        if like is not None and like.shape != out.shape:
            raise ValueError(f"{name}: shape {tuple(like.shape)}, but the result has {tuple(out.shape)}")
    if bias is not None and bias.shape != out.shape[-1:]:
        raise ValueError(f"bias: shape {tuple(bias.shape)}, but the result has {out.shape[-1]} columns")


def launch_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
    activation: str = "none",
    preactivation: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    *,
    with_amax: bool = False,
    config: TileConfig | None = None,
    split: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``cast(activation((a * scale_a) @ (b * scale_b)ᵀ + bias) + residual)`` on Hopper's FP8 tensor cores.

    Args:
        a: FP8 ``[..., M, K]``. b: FP8 ``[..., N, K]``. At most one batch dimension; at most one of the two is E5M2.
            Rows start at multiples of 16 bytes, which a K that is a multiple of 16 gives.
        scale_a: float32 ``[..., M or 1, 1]``. scale_b: float32 ``[..., N or 1, 1]``.
        bias: ``[N]`` of any float dtype.
        out_dtype: of the result ``[..., M, N]``, contiguous: a float, or FP8 with ``out_scale``.
        fast: leave sums in the tensor cores' accumulator (about 14 bits); otherwise every 128 products are added up in
            float32.
        activation: one of :data:`ACTIVATIONS`.
        preactivation: ``[..., M, N]``; multiply by the activation's derivative there instead of applying it.
        residual: ``[..., M, N]``, added after the activation.
        out_scale: one float32; the result is ``quantize(..., out_scale)``.
        with_amax: also return ``max(|result|)``: as stored, or before quantization to FP8. NaN is largest.
        config, split: instead of what :mod:`fp8compile.kernels.configs` chooses.

    Returns:
        The result, and its amax as float32 ``[1]`` or None.

    Raises:
        ValueError: for what Hopper cannot do or what does not fit together, with the reason.
    """
    check_dtypes(a, b, scale_a, scale_b)
    m, n, k = a.shape[-2], b.shape[-2], a.shape[-1]
    batch = a.shape[0] if a.dim() == 3 else 1
    if a.dim() not in (2, 3) or a.shape[:-2] != b.shape[:-2] or b.shape[-1] != k:
        raise ValueError(f"scaled_mm: {tuple(a.shape)} times the transpose of {tuple(b.shape)}")
    out = a.new_empty(*a.shape[:-1], n, dtype=out_dtype)
    amax = zeros(a, 1, dtype=torch.float32) if with_amax else None
    check_epilogue(out, bias, activation, preactivation, residual, out_scale)
    if out.numel() == 0:
        return out, amax
    if k == 0:  # a sum of nothing: multiply zeros
        k = 16
        a, b = zeros(a, *a.shape[:-1], k, dtype=a.dtype), zeros(b, *b.shape[:-1], k, dtype=b.dtype)
    config = config or choose_config(hint(batch), hint(m), hint(n), fast)
    split = split or choose_split(hint(config.tiles(batch, m, n)), ceil_div(hint(k), config.block_k))
    scale_a, by_row_a, step_a = flat_scale("scale_a", scale_a, batch, m)
    scale_b, by_row_b, step_b = flat_scale("scale_b", scale_b, batch, n)
    finish = {
        "scale_a": scale_a,
        "scale_b": scale_b,
        "bias": None if bias is None else bias.contiguous(),
        "residual": None if residual is None else residual.contiguous(),
        "preactivation": None if preactivation is None else preactivation.contiguous(),
        "out_scale": out_scale,
        "amax": amax,
        "SCALE_A_STEP": step_a,
        "SCALE_B_STEP": step_b,
        "BY_ROW_A": by_row_a,
        "BY_ROW_B": by_row_b,
        "ACTIVATION": activation,
    }
    finishing = ["out"] if amax is None else ["out", "amax"]
    written = launch(
        scaled_mm_kernel,
        torch.sym_min(config.tiles(batch, m, n) * split, PROGRAMS),
        {
            **(finish if split == 1 else dict.fromkeys(finish)),
            "a": operand_rows("a", a),
            "b": operand_rows("b", b),
            "out": out if split == 1 else a.new_empty(batch, split, m, n, dtype=torch.float32),
            "BATCH": batch,
            "M": m,
            "N": n,
            "K": k,
            "SPLIT_K": split,
            "FAST": fast,
            **config.constexprs,
        },
        writes=finishing if split == 1 else ["out"],
        blocks={"a": (config.block_m, config.block_k), "b": (config.block_n, config.block_k)},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if split > 1:
        written = launch(
            sum_splits_kernel,
            SUM_SPLITS.tiles(batch, m, n),
            {
                **finish,
                "partials": written["out"],
                "out": out,
                "M": m,
                "N": n,
                "SPLIT_K": split,
                "BLOCK_M": SUM_SPLITS.block_m,
                "BLOCK_N": SUM_SPLITS.block_n,
                "COLUMNS": SUM_SPLITS.epilogue_columns,
            },
            writes=finishing,
            blocks={},
            num_warps=SUM_SPLITS.num_warps,
            num_stages=SUM_SPLITS.num_stages,
        )
    return written["out"], written.get("amax")
