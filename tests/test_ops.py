"""The operators ``torch.ops.fp8compile.*``: their CPU reference against float64 and ml_dtypes, their shape rule against
what really comes out, and what Inductor makes of them against the reference.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile  # noqa: F401  (registers the operators)
from fp8compile.ops import COMPUTE_SCALE, QUANTIZE, QUANTIZE_TRANSPOSED, SCALED_MM, padded_size
from fp8compile.recipe import E4M3, E5M2, LARGEST

NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
RELATIVE_ERROR = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Half a unit in the last place of a normal number: 3 and 2 mantissa bits."""
SMALLEST_SUBNORMAL = {E4M3: 2.0**-9, E5M2: 2.0**-16}
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1e-42, -1e-40, 2.0**-126, 1e-30, 1.0, -1.5, 448.0, 449.0, 464.0, 57344.0, 1e4, 1e5, 3e38, -3e38]
NON_FINITE = [float("nan"), float("inf"), float("-inf")]

quick = settings(max_examples=60, deadline=None)
fp8_dtypes = st.sampled_from([E4M3, E5M2])


# --- Inputs -----------------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn, *, min_side: int = 0, special: list[float] = SPECIAL, dtypes: list[torch.dtype] = FLOATS):
    """Matrices with or without a batch in front: any strides, ordinary numbers over many magnitudes, special values."""
    batch = draw(st.sampled_from([(), (), (1,), (3,)]))
    shape = (*batch, draw(st.integers(min_side, 19)), draw(st.integers(min_side, 19)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_normal(shape) * 10.0 ** draw(st.integers(-30, 4))
    for value in draw(st.lists(st.sampled_from(special), max_size=4)) if special and values.size else []:
        values.flat[rng.integers(values.size)] = value
    x = torch.from_numpy(np.asarray(values)).to(draw(st.sampled_from(dtypes)))
    layout = draw(st.sampled_from(["contiguous", "transposed", "padded", "strided", "reversed_batch"]))
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "padded":
        room = torch.full((*x.shape[:-1], x.shape[-1] + 5), float("nan"), dtype=x.dtype)
        room[..., 2 : 2 + x.shape[-1]] = x
        return room[..., 2 : 2 + x.shape[-1]]
    if layout == "strided":
        room = torch.full((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1]), float("nan"), dtype=x.dtype)
        room[..., ::2, :] = x
        return room[..., ::2, :]
    if layout == "reversed_batch" and x.dim() == 3:
        return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    return x


def scale_dims(x: torch.Tensor) -> st.SearchStrategy[list[int]]:
    """Dimensions that share a scale: all, the rows or the columns, counted from either end."""
    return st.sampled_from([list(range(x.dim())), [x.dim() - 1], [x.dim() - 2], [-1], [-2]])


def float32(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float32).contiguous().numpy()


def raw(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy()


def assert_same_bytes(data: torch.Tensor, expected: np.ndarray) -> None:
    """Byte for byte, but any NaN is as good as another."""
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(float32(data)), nan)
    np.testing.assert_array_equal(np.where(nan, 0, raw(data)), np.where(nan, 0, expected.view(np.uint8)))


def expected_scale(x: torch.Tensor, dims: list[int], dtype: torch.dtype, power_of_two: bool) -> np.ndarray:
    """``max(amax / largest, 2**-126)``, the division rounded once to float32."""
    amax = np.max(np.abs(x.to(torch.float64).numpy()), axis=tuple(dims), keepdims=True, initial=0.0)
    with np.errstate(invalid="ignore"):
        scale = np.maximum((amax / LARGEST[dtype]).astype(np.float32), np.float32(2.0**-126))
    if power_of_two:
        mantissa, exponent = np.frexp(scale)
        rounded = np.ldexp(1.0, exponent - (mantissa == 0.5)).astype(np.float32)
        scale = np.where(np.isfinite(scale), rounded, scale)
    return scale


# --- compute_scale ----------------------------------------------------------------------------------------------------


@given(st.data())
@quick
def test_scale_is_amax_over_the_largest_number_exactly(data: st.DataObject) -> None:
    """Equal to float64 arithmetic rounded once, for any shape, strides, dtype, group and special value."""
    x = data.draw(tensors(special=SPECIAL + NON_FINITE))
    dims, dtype, power_of_two = data.draw(scale_dims(x)), data.draw(fp8_dtypes), data.draw(st.booleans())
    scale = COMPUTE_SCALE(x, dims, dtype, power_of_two)
    assert scale.dtype == torch.float32
    np.testing.assert_array_equal(scale.numpy(), expected_scale(x, dims, dtype, power_of_two))


@given(tensors(min_side=1), fp8_dtypes, st.booleans())
@quick
def test_scale_of_finite_values_is_finite_normal_and_keeps_them_in_range(
    x: torch.Tensor, dtype: torch.dtype, power_of_two: bool
) -> None:
    """Zeros and subnormals included, a scale has a finite reciprocal and ``|x| / scale`` is at most the largest number
    (up to the scale's own rounding, which ``quantize`` saturates)."""
    x = x.nan_to_num(0.0, 1.0, -1.0)
    scale = COMPUTE_SCALE(x, [-1], dtype, power_of_two).double()
    assert torch.isfinite(scale).all()
    assert torch.isfinite(scale.float().reciprocal()).all()
    assert (scale >= 2.0**-126).all()
    assert (x.double().abs() / scale <= LARGEST[dtype] * (1 + 2**-23)).all()


@given(st.floats(2.0**-126, 2.0**117, width=32))
@quick
def test_power_of_two_scale_is_the_next_power_of_two(value: float) -> None:
    """Never below the plain scale, less than twice it, and a power of two."""
    x = torch.tensor([[value]], dtype=torch.float32)
    plain, rounded = (COMPUTE_SCALE(x, [0, 1], E4M3, flag).item() for flag in (False, True))
    assert plain <= rounded < 2 * plain
    assert np.frexp(rounded)[0] == 0.5


@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_non_finite_value_reaches_its_own_group_and_no_other(value: float, power_of_two: bool) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = value
    finite = torch.isfinite(COMPUTE_SCALE(x, [1], E4M3, power_of_two)).flatten()
    assert finite.tolist() == [True, False, True]
    assert not torch.isfinite(COMPUTE_SCALE(x, [0, 1], E4M3, power_of_two)).any()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (2, 0, 3), (0, 3, 4)])
def test_scale_of_nothing_is_the_smallest(shape: tuple[int, ...]) -> None:
    """The amax of an empty group is zero; an empty set of groups has an empty set of scales."""
    x = torch.empty(shape)
    rows = COMPUTE_SCALE(x, [x.dim() - 1], E4M3, False)
    assert rows.shape == (*shape[:-1], 1)
    assert (rows == 2.0**-126).all()
    assert COMPUTE_SCALE(x, list(range(x.dim())), E4M3, False).flatten().tolist() == [2.0**-126]


# --- quantize ---------------------------------------------------------------------------------------------------------


@given(st.data())
@quick
def test_quantize_equals_ml_dtypes_byte_for_byte(data: st.DataObject) -> None:
    """``sat(round_nearest_even(x / scale))`` for any shape, strides and values, with any scale of its own."""
    x = data.draw(tensors(special=SPECIAL + NON_FINITE))
    dtype = data.draw(fp8_dtypes)
    scale = COMPUTE_SCALE(x, data.draw(scale_dims(x)), dtype, data.draw(st.booleans()))
    assert_same_bytes(QUANTIZE(x, scale, dtype, False, [1, 1]), expected_data(x, scale, dtype))


def expected_data(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scaled = float32(x) / float32(scale)
        return np.clip(scaled, -LARGEST[dtype], LARGEST[dtype]).astype(NUMPY[dtype])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_representable_number_and_every_tie(dtype: torch.dtype) -> None:
    """With scale 1: numbers of the format stay, their midpoints go to the even neighbour, what is beyond saturates."""
    numbers = np.arange(256, dtype=np.uint8).view(NUMPY[dtype]).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    beyond = LARGEST[dtype] * np.array([1.01, 1.04, 1.0358, 1.5, 2.0, 1e6])
    values = np.concatenate([numbers, [-0.0], midpoints, np.nextafter(midpoints, 1e9), beyond, -beyond])
    x = torch.from_numpy(values).float().unsqueeze(0)
    got = QUANTIZE(x, torch.ones(1, 1), dtype, False, [1, 1])
    assert_same_bytes(got, expected_data(x, torch.ones(1, 1), dtype))
    np.testing.assert_array_equal(float32(got)[0, : len(numbers)], numbers)
    assert float32(got)[0, -len(beyond) :].tolist() == [-LARGEST[dtype]] * len(beyond)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("value", NON_FINITE)
def test_non_finite_stays_non_finite(dtype: torch.dtype, value: float) -> None:
    """Torch's E4M3 cast turns Inf into 448; data times scale must not be finite where the input was not."""
    x = torch.ones(2, 8)
    x[0, 3] = value
    scale = COMPUTE_SCALE(x, [1], dtype, False)
    back = QUANTIZE(x, scale, dtype, False, [1, 1]).float() * scale
    assert not torch.isfinite(back[0, 3])
    assert torch.isfinite(back[1]).all()


@given(tensors(min_side=1, special=[0.0, 1e-42, -1e-40]), fp8_dtypes, st.booleans())
@quick
def test_round_trip_error_is_half_a_unit_in_the_last_place(x: torch.Tensor, dtype: torch.dtype, power: bool) -> None:
    """``|data · scale - x|`` is at most half a unit in the last place of the format, plus float32's own rounding."""
    scale = COMPUTE_SCALE(x, [-1], dtype, power)
    back = QUANTIZE(x, scale, dtype, False, [1, 1]).double() * scale.double()
    wide = x.double()
    bound = torch.maximum(wide.abs() * RELATIVE_ERROR[dtype], SMALLEST_SUBNORMAL[dtype] / 2 * scale.double())
    assert ((back - wide).abs() <= bound * (1 + 2**-20)).all()


@given(tensors(min_side=1, special=[0.0, -0.0]), fp8_dtypes)
@quick
def test_zeros_stay_zeros(x: torch.Tensor, dtype: torch.dtype) -> None:
    x = x.clone()
    x[..., 0, :] = 0.0
    data = QUANTIZE(x, COMPUTE_SCALE(x, [-1], dtype, False), dtype, False, [1, 1])
    assert (data.float()[x == 0] == 0).all()


@given(st.data())
@quick
def test_power_of_two_scales_never_change_a_mantissa(data: st.DataObject) -> None:
    """A number of the format times a power of two comes back exactly."""
    dtype, exponent = data.draw(fp8_dtypes), data.draw(st.integers(-60, 60))
    codes = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=9))
    numbers = torch.from_numpy(np.array(codes, dtype=np.uint8).view(NUMPY[dtype]).astype(np.float32))
    x = torch.cat([numbers.nan_to_num(0, 1, -1), torch.tensor([LARGEST[dtype]])]).unsqueeze(0) * 2.0**exponent
    scale = COMPUTE_SCALE(x, [1], dtype, True)
    assert torch.equal(QUANTIZE(x, scale, dtype, False, [1, 1]).float() * scale, x)


@given(st.data())
@quick
def test_transpose_and_padding_are_only_a_layout(data: st.DataObject) -> None:
    """Transposed and padded data has the bytes of the plain data, zeros around them, and lies contiguous; what was in
    memory around a strided input never gets in."""
    x, dtype = data.draw(tensors()), data.draw(fp8_dtypes)
    transpose, multiples = data.draw(st.booleans()), data.draw(st.sampled_from([[1, 1], [1, 16], [16, 16], [7, 3]]))
    scale = COMPUTE_SCALE(x, [-1], dtype, False)
    plain = raw(QUANTIZE(x, scale, dtype, False, [1, 1]))
    got = QUANTIZE(x, scale, dtype, transpose, multiples)
    expected = np.swapaxes(plain, -1, -2) if transpose else plain
    missing = [(0, -size % multiple) for size, multiple in zip(expected.shape[-2:], multiples, strict=True)]
    expected = np.pad(expected, [(0, 0)] * (expected.ndim - 2) + missing)
    assert got.is_contiguous()
    np.testing.assert_array_equal(raw(got), expected)


@given(st.integers(0, 10_000), st.integers(1, 300))
@quick
def test_padded_size_is_the_next_multiple(size: int, multiple: int) -> None:
    padded = padded_size(size, multiple)
    assert padded % multiple == 0
    assert 0 <= padded - size < multiple


def test_operators_do_not_write_to_their_inputs_nor_return_them() -> None:
    """A cast of data that already has the right values and layout is still a new tensor."""
    x = torch.randn(4, 16)
    kept = x.clone()
    scale = COMPUTE_SCALE(x, [1], E4M3, False)
    data = QUANTIZE(x, scale, E4M3, False, [1, 1])
    out = SCALED_MM(data, data, scale, scale, None, torch.float32, False)
    assert torch.equal(x, kept)
    pointers = [t.untyped_storage().data_ptr() for t in (x, scale, data, out)]
    assert len(set(pointers)) == 4


# --- scaled_mm --------------------------------------------------------------------------------------------------------


@st.composite
def gemms(draw: st.DrawFn, min_side: int = 0):
    """Operands of ``scaled_mm`` with scales of their own per row or one for all; E5M2 on either side."""
    batch = draw(st.sampled_from([(), (), (2,)]))
    m, n, k = (draw(st.integers(min_side, 24)) for _ in range(3))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    operands = []
    for rows in (m, n):
        data = (torch.randn(*batch, rows, k, generator=rng) * 20).to(draw(fp8_dtypes))
        group = draw(st.sampled_from([(*batch, rows, 1), (1,) * (len(batch) + 1) + (1,)]))
        scale = torch.exp2(torch.randint(-40, 20, group, generator=rng).float()) * (
            1 + torch.rand(group, generator=rng)
        )
        operands.append((data, scale))
    bias = torch.randn(n, generator=rng) if draw(st.booleans()) else None
    return operands, bias, draw(st.sampled_from(FLOATS))


@given(gemms())
@quick
def test_scaled_mm_equals_float64_up_to_float32_sums(problem) -> None:
    """Error against float64: K roundings of a float32 sum, three of the scales and the bias, one to the result's dtype.
    Includes empty M, N and K, where the result is the bias or zero."""
    ((a, scale_a), (b, scale_b)), bias, out_dtype = problem
    got = SCALED_MM(a, b, scale_a, scale_b, bias, out_dtype, False)
    wide_a, wide_b = a.double() * scale_a.double(), b.double() * scale_b.double()
    offset = torch.zeros(b.shape[-2], dtype=torch.float64) if bias is None else bias.double()
    exact = wide_a @ wide_b.mT + offset
    assert got.shape == exact.shape
    assert got.dtype == out_dtype
    magnitude = wide_a.abs() @ wide_b.abs().mT + offset.abs()
    tiny, rounding = torch.finfo(out_dtype).tiny, torch.finfo(out_dtype).eps / 2
    bound = magnitude * (a.shape[-1] + 4) * 2.0**-24 + exact.abs() * rounding * 1.01 + tiny
    fits = exact.abs() < torch.finfo(out_dtype).max * 0.99
    assert ((got.double() - exact).abs() <= bound)[fits].all()


def test_every_row_and_column_has_its_own_scale() -> None:
    """M = N so that a scale read for the wrong side would go unnoticed by shapes: one-hot rows show each product."""
    a, b = torch.eye(16, 32).to(E4M3), torch.eye(16, 32).roll(1, 0).to(E4M3)
    scale_a = torch.arange(1, 17).float().unsqueeze(1)
    scale_b = torch.arange(101, 117).float().unsqueeze(1)
    out = SCALED_MM(a, b, scale_a, scale_b, None, torch.float32, False)
    expected = torch.zeros(16, 16)
    for column in range(16):
        row = (column - 1) % 16
        expected[row, column] = (row + 1) * (column + 101)
    assert torch.equal(out, expected)


def test_product_of_scales_may_underflow_where_the_result_does_not() -> None:
    """2**-80 · 2**-80 is below float32; with data of 2**7 · 2**7 · 2**10 the result is the subnormal 2**-136."""
    a = torch.full((1, 1024), 128.0).to(E4M3)
    tiny = torch.full((1, 1), 2.0**-80)
    assert SCALED_MM(a, a, tiny, tiny, None, torch.float32, False).item() == 2.0**-136


def test_sum_of_equal_signs_over_a_long_contraction() -> None:
    """K = 16384: the reference sums in float32, so the relative error of a sum of ones stays below K · 2**-24."""
    ones = torch.ones(2, 16384)
    data = (ones * 0.8125).to(E4M3)
    one = torch.ones(1, 1)
    out = SCALED_MM(data, data, one, one, None, torch.float32, False).double()
    exact = 16384 * 0.8125**2
    assert (out / exact - 1).abs().max() <= 16384 * 2.0**-24


@pytest.mark.parametrize("value", NON_FINITE)
def test_non_finite_operand_reaches_the_outputs_that_depend_on_it_only(value: float) -> None:
    x, w = torch.randn(4, 32), torch.randn(8, 32)
    x[2, 5] = value
    scales = [COMPUTE_SCALE(t, [1], E4M3, False) for t in (x, w)]
    data = [QUANTIZE(t, s, E4M3, False, [1, 1]) for t, s in zip((x, w), scales, strict=True)]
    out = SCALED_MM(*data, *scales, None, torch.float32, False)
    assert torch.isfinite(out).all(dim=1).tolist() == [True, True, False, True]
    assert not torch.isfinite(out[2]).any()


def test_padding_of_the_contraction_does_not_change_the_result() -> None:
    """Zeros in the padding of both operands add nothing."""
    x, w = torch.randn(5, 23), torch.randn(7, 23)
    scale_x, scale_w = (COMPUTE_SCALE(t, [1], E4M3, False) for t in (x, w))
    outs = []
    for multiple in (1, 16):
        a, b = QUANTIZE(x, scale_x, E4M3, False, [1, multiple]), QUANTIZE(w, scale_w, E4M3, False, [1, multiple])
        outs.append(SCALED_MM(a, b, scale_x, scale_w, None, torch.float64, False))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-6, atol=1e-6)


# --- Shape rule and registration --------------------------------------------------------------------------------------


def assert_fake_agrees(operator, *args) -> None:
    real = operator(*args)
    mode = FakeTensorMode()
    fake_args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
    with mode:
        fake = operator(*fake_args)
    meta = operator(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in args])
    for other in (fake, meta):
        assert (other.shape, other.dtype) == (real.shape, real.dtype)
        assert other.stride() == real.stride() or not real.numel()  # strides of nothing mean nothing


@given(st.data())
@quick
def test_shape_rule_of_casts_is_what_comes_out(data: st.DataObject) -> None:
    """Shape, strides and dtype of fake and meta tensors equal the real ones, for any input layout."""
    x, dtype = data.draw(tensors()), data.draw(fp8_dtypes)
    dims = data.draw(scale_dims(x))
    transpose, multiples = data.draw(st.booleans()), data.draw(st.sampled_from([[1, 1], [16, 16], [1, 16], [7, 3]]))
    power_of_two = data.draw(st.booleans())
    assert_fake_agrees(COMPUTE_SCALE, x, dims, dtype, power_of_two)
    assert_fake_agrees(QUANTIZE, x, COMPUTE_SCALE(x, dims, dtype, power_of_two), dtype, transpose, multiples)


@given(gemms())
@quick
def test_shape_rule_of_scaled_mm_is_what_comes_out(problem) -> None:
    ((a, scale_a), (b, scale_b)), bias, out_dtype = problem
    assert_fake_agrees(SCALED_MM, a, b, scale_a, scale_b, bias, out_dtype, True)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(5, 40), (2, 5, 40)])
def test_opcheck(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Torch's own check of a custom operator. Its schema test compares inputs before and after, which float8 has no
    operator for, so ``scaled_mm`` passes only the others."""
    x = torch.randn(shape)
    scale = COMPUTE_SCALE(x, [-1], dtype, True)
    data = QUANTIZE(x, scale, dtype, False, [1, 16])
    without_schema = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(COMPUTE_SCALE, (x, [len(shape) - 1], dtype, True))
    torch.library.opcheck(QUANTIZE, (x, scale, dtype, True, [16, 16]))
    torch.library.opcheck(SCALED_MM, (data, data, scale, scale, None, torch.bfloat16, False), test_utils=without_schema)


# --- What Inductor makes of them --------------------------------------------------------------------------------------


def compiled(function, *, dynamic: bool | None = None):
    torch._dynamo.reset()
    return torch.compile(function, backend="fp8", dynamic=dynamic, fullgraph=True, options={"verify": True})


def awkward(*shape: int) -> torch.Tensor:
    """Values over many magnitudes, with zeros, ties, subnormals and numbers beyond both formats."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 12, shape).float())
    edge = torch.tensor([0.0, -0.0, 1e-42, 448.0, 464.0, 0.0625, 17.0, 2.0**-126])
    x.view(-1)[: len(edge)] = edge
    return x


def test_lowered_casts_have_the_bytes_of_the_reference() -> None:
    """One program with every dtype, granularity, scale rule and layout, non-finite rows included."""

    def casts(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for dtype in (E4M3, E5M2):
            for dims in ([0, 1], [1], [0]):
                for power_of_two in (False, True):
                    scale = COMPUTE_SCALE(x, dims, dtype, power_of_two)
                    results += [scale, QUANTIZE(x, scale, dtype, False, [1, 1])]
                    results.append(QUANTIZE(x, scale, dtype, True, [16, 16]))
        return results

    torch.manual_seed(0)
    run = compiled(casts)
    inputs = [awkward(21, 37), torch.zeros(21, 37), awkward(21, 37)]
    inputs[2][3, 4], inputs[2][5, 6] = float("inf"), float("nan")
    for x in inputs:
        assert_all_bytes_equal(run(x), casts(x))


def test_lowered_casts_pad_dynamic_sizes() -> None:
    """Rows and columns that are not known while compiling are padded to their multiple at run time."""

    def casts(x: torch.Tensor) -> list[torch.Tensor]:
        scale = COMPUTE_SCALE(x, [1], E4M3, False)
        return [QUANTIZE(x, scale, E4M3, transpose, [1, 16]) for transpose in (False, True)]

    torch.manual_seed(0)
    run = compiled(casts, dynamic=True)
    for shape in ((21, 37), (32, 48), (5, 17)):
        x = awkward(*shape)
        assert_all_bytes_equal(run(x), casts(x))


def test_lowered_scaled_mm_equals_the_reference() -> None:
    """Row and tensor scales, with a bias and without, batched and not: the same sums, so the same float32 bits but for
    the order in which a vectorized epilogue multiplies; bounded by 4 roundings."""

    def products(a, b, scales, bias):
        first, second = scales
        return [
            SCALED_MM(a[0], b[0], first[0], second[0], bias, torch.float32, True),
            SCALED_MM(a[0], b[0], first[0, :1], second[0], None, torch.float32, False),
            SCALED_MM(a, b, first, second, None, torch.float32, False),
        ]

    torch.manual_seed(0)
    x, w, bias = torch.randn(2, 16, 64), torch.randn(2, 32, 64), torch.randn(32)
    scales = [COMPUTE_SCALE(t, [2], E4M3, False) for t in (x, w)]
    a, b = (QUANTIZE(t, s, E4M3, False, [1, 1]) for t, s in zip((x, w), scales, strict=True))
    for got, expected in zip(compiled(products)(a, b, scales, bias), products(a, b, scales, bias), strict=True):
        magnitude = expected.abs().max() + bias.abs().max()
        assert (got - expected).abs().max() <= 4 * 2.0**-24 * magnitude


def assert_all_bytes_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, reference in zip(got, expected, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (reference.shape, reference.dtype, reference.stride())
        if ours.dtype == torch.float32:
            torch.testing.assert_close(ours, reference, rtol=0, atol=0, equal_nan=True)
        else:
            assert_same_bytes(ours, np.ascontiguousarray(raw(reference)).view(NUMPY[ours.dtype]))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_transposing_to_one_scale_changes_no_value_that_stays_normal(dtype: torch.dtype) -> None:
    """Rows whose scales differ by at most a few binades: the transposed data stand for exactly what the rows' do."""
    x = torch.randn(40, 24) * torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat(10)[:, None]
    x = x.sign() * x.abs().clamp_min(0.5)  # far enough from the subnormals
    row_scale = COMPUTE_SCALE(x, [-1], dtype, True)
    rows = QUANTIZE(x, row_scale, dtype, False, [1, 1])
    data, scale = QUANTIZE_TRANSPOSED(rows, row_scale, dtype, [1, 1])
    assert scale.shape == (1, 1)
    assert scale.item() == row_scale.max().item()
    assert torch.equal(data.float() * scale, (rows.float() * row_scale).mT)


@given(st.data())
def test_transposing_from_high_precision_rounds_once(data: st.DataObject) -> None:
    """It is the plain tensorwise cast with the largest of the rows' scales."""
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    x = torch.randn(rows, columns) * 2.0 ** torch.randint(-20, 20, (rows, 1))
    row_scale = COMPUTE_SCALE(x, [-1], E4M3, True)
    got, scale = QUANTIZE_TRANSPOSED(x, row_scale, E4M3, [16, 16])
    expected = QUANTIZE(x, row_scale.max().view(1, 1), E4M3, True, [16, 16])
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    assert scale.item() == row_scale.max().item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_transposing_keeps_what_is_not_finite(bad: float) -> None:
    """The group is the whole matrix: its scale is not finite, and so is every product with it."""
    x = torch.randn(5, 8)
    x[3, 2] = bad
    row_scale = COMPUTE_SCALE(x, [-1], E4M3, True)
    rows = QUANTIZE(x, row_scale, E4M3, False, [1, 1])
    for source in (x, rows):
        data, scale = QUANTIZE_TRANSPOSED(source, row_scale, E4M3, [1, 1])
        assert not torch.isfinite(data.float() * scale)[2, 3]


def test_transposing_zeros_gives_zeros() -> None:
    x = torch.zeros(5, 8)
    data, scale = QUANTIZE_TRANSPOSED(x, COMPUTE_SCALE(x, [-1], E4M3, True), E4M3, [16, 16])
    assert (data.float() == 0).all()
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
