"""What happens to a tile of sums before it is stored: scales, bias, activation, residual, amax, cast."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normal_distribution(x):
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def activation(x, NAME: tl.constexpr):
    """``NAME`` is none, relu, silu, gelu (with erf) or gelu_tanh. NaN stays NaN."""
    if NAME == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif NAME == "silu":
        x = x * tl.sigmoid(x)
    elif NAME == "gelu":
        x = x * normal_distribution(x)
    elif NAME == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def activation_slope(x, NAME: tl.constexpr):
    """The derivative of :func:`activation`."""
    if NAME == "relu":
        slope = tl.where(x <= 0, 0.0, 1.0)
    elif NAME == "silu":
        gate = tl.sigmoid(x)
        slope = gate * (1.0 + x * (1.0 - gate))
    elif NAME == "gelu":
        slope = normal_distribution(x) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        tl.static_assert(NAME == "gelu_tanh", "activation is unknown")
        gate = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        slope = gate + x * gate * (1.0 - gate) * inner
    return slope


@triton.jit
def apply_scale(sums, scale, index, inside, BY_INDEX: tl.constexpr, AXIS: tl.constexpr):
    """Multiply by one scale (BY_INDEX false) or by one for each row (AXIS 1) or column (AXIS 0)."""
    if BY_INDEX:
        return sums * tl.expand_dims(tl.load(scale + index, mask=inside, other=0.0), AXIS)
    else:
        return sums * tl.load(scale)


@triton.jit
def saturate(x, LARGEST: tl.constexpr):
    """Comparisons with NaN are false, so NaN stays NaN."""
    x = tl.where(x > LARGEST, LARGEST, x)
    return tl.where(x < -LARGEST, -LARGEST, x)


@triton.jit
def quantize(x, scale, dtype: tl.constexpr):
    """``sat(round_nearest_even(x / scale))``."""
    LARGEST: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
    return saturate(tl.div_rn(x, scale), LARGEST).to(dtype)


@triton.jit
def store_amax(x, inside, amax):
    """Maximum of ``|x|`` into a float32. As integers magnitudes keep their order, and NaN is above Inf."""
    bits = tl.where(inside, x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")


@triton.jit
def halves(x):
    """The left and the right half of the columns."""
    WIDTH: tl.constexpr = x.shape[1] // 2
    return x.reshape(x.shape[0], 2, WIDTH).permute(0, 2, 1).split()


@triton.jit
def finish_tile(
    x, row, column, first_row, M, N,
    out, scale_a, scale_b, bias, residual, preactivation, out_scale, amax,
    BY_ROW_A: tl.constexpr, BY_ROW_B: tl.constexpr, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Everything after the sums, and the store, for a tile of ``[M, N]``.

    Args:
        x: float32. row, column: of its first element. first_row: of the matrix in ``out``, int64.
        out, residual, preactivation: pointers to ``[..., N]``, contiguous.
        scale_a, scale_b, bias, residual, preactivation, out_scale, amax: pointers, or None.
        COLUMNS: of the tile that are worked on at a time; all of them at once may need more registers than there are.
    """
    if x.shape[1] > COLUMNS:
        left, right = halves(x)
        finish_tile(
            left, row, column, first_row, M, N, out, scale_a, scale_b, bias, residual, preactivation, out_scale, amax,
            BY_ROW_A, BY_ROW_B, ACTIVATION, COLUMNS,
        )  # fmt: skip
        finish_tile(
            right, row, column + x.shape[1] // 2, first_row, M, N,
            out, scale_a, scale_b, bias, residual, preactivation, out_scale, amax,
            BY_ROW_A, BY_ROW_B, ACTIVATION, COLUMNS,
        )  # fmt: skip
    else:
        rows = row + tl.arange(0, x.shape[0])
        columns = column + tl.arange(0, x.shape[1])
        inside_rows = rows < M
        inside_columns = columns < N
        inside = inside_rows[:, None] & inside_columns[None, :]
        offsets = (first_row + rows)[:, None] * N + columns[None, :]
        tl.static_assert(offsets.dtype == tl.int64, "offsets in a matrix may pass 2**31")
        if scale_a is not None:
            x = apply_scale(x, scale_a, rows, inside_rows, BY_ROW_A, 1)
            x = apply_scale(x, scale_b, columns, inside_columns, BY_ROW_B, 0)
        if bias is not None:
            x += tl.load(bias + columns, mask=inside_columns, other=0.0).to(tl.float32)[None, :]
        if preactivation is not None:
            saved = tl.load(preactivation + offsets, mask=inside, other=0.0).to(tl.float32)
            x *= activation_slope(saved, ACTIVATION)
        else:
            x = activation(x, ACTIVATION)
        if residual is not None:
            x += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        if out_scale is not None:
            rounded = quantize(x, tl.load(out_scale), out.dtype.element_ty)
        else:
            rounded = x.to(out.dtype.element_ty)
            x = rounded
        if amax is not None:
            store_amax(x, inside, amax)
        tl.store(out + offsets, rounded, mask=inside)
