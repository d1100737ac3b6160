"""Quantize and transpose in one kernel, under Triton's interpreter: the bytes of the reference, whatever the size, the
source and the values. Its machine code is tested in test_machine_code.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8compile.kernels import quantize_transposed as kernels
from fp8compile.ops import COMPUTE_SCALE, QUANTIZE, QUANTIZE_TRANSPOSED
from fp8compile.preview.interpreter import InterpreterProcess
from fp8compile.recipe import E4M3, E5M2

LAUNCH = "fp8compile.kernels.quantize_transposed:launch_quantize_transposed"
ON_TWO_PROGRAMS = __name__ + ":launch_on_two_programs"
NAN_BYTE = 0x7F
"""Memory full of it holds NaN in both FP8 dtypes and in float16, and 3.4e38 in bfloat16 and float32."""
SOURCES = [torch.bfloat16, torch.float16, torch.float32, E4M3, E5M2]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[InterpreterProcess]:
    with InterpreterProcess() as process:
        yield process


def launch_on_two_programs(*arguments: Any) -> Any:
    """In the interpreter: every program has several tiles."""
    with mock.patch.object(kernels, "PROGRAMS", 2):
        return kernels.launch_quantize_transposed(*arguments)


def rows_of_many_sizes(rows: int, columns: int) -> torch.Tensor:
    """Normal data; neighbouring rows differ by up to 12 binades, so that some rows become subnormal and some zero under
    the scale of the largest."""
    return torch.randn(rows, columns) * 2.0 ** torch.randint(-12, 1, (rows, 1))


def source_of(x: torch.Tensor, source: torch.dtype, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` as the kernel gets it, and its rows' scales: high precision, or FP8 data quantized by row."""
    if source in (E4M3, E5M2):
        scale = COMPUTE_SCALE(x, [-1], source, True)
        return QUANTIZE(x, scale, source, False, [1, 1]), scale
    x = x.to(source)
    return x, COMPUTE_SCALE(x, [-1], dtype, True)


def assert_same(
    got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], data_of_nan: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same bytes, shapes and scale; with ``data_of_nan``, NaN for NaN, whose sign hardware and CPU set as they
    like."""
    (data, scale), (expected_data, expected_scale) = got, expected
    assert (data.shape, data.dtype, data.is_contiguous()) == (expected_data.shape, expected_data.dtype, True)
    assert (scale.shape, scale.dtype) == ((1, 1), torch.float32)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    nan = expected_data.float().isnan()
    assert torch.equal(data.float().isnan(), nan)
    assert data_of_nan or not nan.any()
    assert torch.equal(data.view(torch.uint8)[~nan], expected_data.view(torch.uint8)[~nan])
    return data, scale


# --- Bytes of the reference -------------------------------------------------------------------------------------------

SHAPES = [(1, 1), (3, 17), (13, 3), (100, 13), (16, 500), (500, 100), (129, 128), (128, 130)]
"""Odd ones, those of HARD_CASES.md, and one more than a tile in either direction."""


@pytest.mark.parametrize("multiples", [(1, 1), (16, 16)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", SOURCES)
def test_bytes_are_those_of_the_reference(
    interpreter: InterpreterProcess, source: torch.dtype, dtype: torch.dtype, multiples: tuple[int, int]
) -> None:
    """Any source, any size; what is rounded up is zero."""
    for rows, columns in SHAPES:
        x, row_scale = source_of(rows_of_many_sizes(rows, columns), source, dtype)
        arguments = x, row_scale, dtype, multiples
        data, _ = assert_same(interpreter.call(LAUNCH, *arguments), QUANTIZE_TRANSPOSED(*arguments))
        assert data.shape == tuple(-(-size // m) * m for size, m in zip((columns, rows), multiples, strict=True))
        assert not data.view(torch.uint8)[columns:].any()
        assert not data.view(torch.uint8)[:, rows:].any()


@pytest.mark.parametrize("source", [torch.bfloat16, E4M3])
def test_tiles_and_programs_do_not_change_a_byte(interpreter: InterpreterProcess, source: torch.dtype) -> None:
    """Three by three tiles on two programs: each is written once, whoever writes it."""
    x, row_scale = source_of(rows_of_many_sizes(300, 260), source, E4M3)
    arguments = x, row_scale, E4M3, (16, 16)
    assert_same(interpreter.call(ON_TWO_PROGRAMS, *arguments), QUANTIZE_TRANSPOSED(*arguments))


@pytest.mark.parametrize("place", [0, 1023, 1024, 2099])
def test_largest_scale_is_found_wherever_it_is(interpreter: InterpreterProcess, place: int) -> None:
    """Scales are read 1024 at a time."""
    assert kernels.SCALES_AT_ONCE == 1024
    x = torch.randn(2100, 2)
    x[place] *= 2.0**20
    arguments = x, COMPUTE_SCALE(x, [-1], E4M3, True), E4M3, (1, 1)
    _, scale = assert_same(interpreter.call(LAUNCH, *arguments), QUANTIZE_TRANSPOSED(*arguments))
    assert scale.item() == arguments[1][place].item() > 2.0**9


# --- Both layouts (K6) ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_both_layouts_are_one_cast(interpreter: InterpreterProcess, source: torch.dtype, dtype: torch.dtype) -> None:
    """From high precision: the bytes of quantizing with that scale, then transposing. From those bytes: the same
    again, since rows that share a scale have nothing to be changed."""
    x = rows_of_many_sizes(70, 140).to(source)
    row_scale = COMPUTE_SCALE(x, [-1], dtype, True)
    data, scale = interpreter.call(LAUNCH, x, row_scale, dtype, (1, 1))
    rows = QUANTIZE(x, row_scale.max().view(1, 1), dtype, False, [1, 1])
    assert torch.equal(data.view(torch.uint8), rows.view(torch.uint8).mT)
    again, same = interpreter.call(LAUNCH, rows, scale.expand(70, 1), dtype, (1, 1))
    assert torch.equal(again.view(torch.uint8), data.view(torch.uint8))
    assert same.item() == scale.item() == row_scale.max().item()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rows_with_scales_of_their_own_keep_their_values(interpreter: InterpreterProcess, dtype: torch.dtype) -> None:
    """Scales are powers of two: within a few binades FP8 data stand for the same values before and after, none rounded
    twice."""
    x = torch.randn(40, 24) * torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat(10)[:, None]
    x = x.sign() * x.abs().clamp_min(0.5)  # far enough from the subnormals
    row_scale = COMPUTE_SCALE(x, [-1], dtype, True)
    assert row_scale.unique().numel() >= 3
    rows = QUANTIZE(x, row_scale, dtype, False, [1, 1])
    data, scale = interpreter.call(LAUNCH, rows, row_scale, dtype, (1, 1))
    assert torch.equal(data.float() * scale, (rows.float() * row_scale).mT)


# --- Strides and what lies around (V8) --------------------------------------------------------------------------------


def among_nan_bytes(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a view into memory that is full of 0x7F, with padded rows and an offset."""
    rows, columns = x.shape
    raw = torch.full((rows + 140, (columns + 147) * x.itemsize), NAN_BYTE, dtype=torch.uint8).view(x.dtype)
    raw[3 : 3 + rows, 5 : 5 + columns] = x
    return raw[3 : 3 + rows, 5 : 5 + columns]


@pytest.mark.parametrize("source", SOURCES)
def test_what_lies_around_operands_is_not_read(interpreter: InterpreterProcess, source: torch.dtype) -> None:
    """Rows further apart than they are wide, scales in a column of a matrix, 0x7F between."""
    x, row_scale = source_of(rows_of_many_sizes(37, 45), source, E4M3)
    framed, scales = among_nan_bytes(x), among_nan_bytes(row_scale)
    assert framed.stride() == (45 + 147, 1)
    assert scales.stride() == (148, 1)
    expected = QUANTIZE_TRANSPOSED(x, row_scale, E4M3, [16, 16])
    assert_same(interpreter.call(LAUNCH, framed, scales, E4M3, (16, 16)), expected)
    assert_same(interpreter.call(LAUNCH, framed, row_scale, E4M3, (16, 16)), expected)


def test_rows_may_be_the_same_row(interpreter: InterpreterProcess) -> None:
    """A row stride of zero, as an expanded gradient has it."""
    x = torch.randn(1, 20).expand(9, 20)
    arguments = x, COMPUTE_SCALE(x, [-1], E4M3, True), E4M3, (1, 1)
    assert_same(interpreter.call(LAUNCH, *arguments), QUANTIZE_TRANSPOSED(*arguments))


# --- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, E4M3])
def test_non_finite_value_makes_the_scale_non_finite_and_padding_stays_zero(
    interpreter: InterpreterProcess, source: torch.dtype, bad: float
) -> None:
    """The group is the whole matrix; what stands for the bad value is not finite, and padding times anything is zero,
    or NaN where a scale is NaN, as it should be."""
    x = torch.randn(5, 18)
    x[3, 2] = bad
    x, row_scale = source_of(x, source, E4M3)
    arguments = x, row_scale, E4M3, (16, 16)
    data, scale = assert_same(interpreter.call(LAUNCH, *arguments), QUANTIZE_TRANSPOSED(*arguments), data_of_nan=True)
    assert not scale.isfinite()
    assert not (data.float() * scale)[2, 3].isfinite()
    assert not data.view(torch.uint8)[18:].any()
    assert not data.view(torch.uint8)[:, 5:].any()


@pytest.mark.parametrize("source", SOURCES)
def test_zero_rows_are_zeros(interpreter: InterpreterProcess, source: torch.dtype) -> None:
    """One row of zeros among others, then nothing but zeros: the scale stays finite and positive. Byte for byte, so
    -0 is -0."""
    x = torch.randn(20, 30)
    x[7] = 0.0
    x[8] = -0.0
    for values in (x, torch.zeros(20, 30)):
        given, row_scale = source_of(values, source, E4M3)
        arguments = given, row_scale, E4M3, (1, 1)
        data, scale = assert_same(interpreter.call(LAUNCH, *arguments), QUANTIZE_TRANSPOSED(*arguments))
        assert not data.float()[:, 7:9].any()
        assert scale.isfinite()
        assert scale > 0
    assert scale.item() == 2.0**-126


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_subnormal_values_divide_like_others(interpreter: InterpreterProcess, dtype: torch.dtype) -> None:
    """1e-42 over the smallest scale, 2**-126, is 8.5e-5: 6 of E5M2's smallest steps, less than half of E4M3's. Beside
    rows of ordinary size it is zero."""
    x = torch.full((6, 20), 1e-42)
    arguments = x, COMPUTE_SCALE(x, [-1], dtype, True), dtype, (1, 1)
    data, scale = assert_same(interpreter.call(LAUNCH, *arguments), QUANTIZE_TRANSPOSED(*arguments))
    assert scale.item() == 2.0**-126
    assert (data.float() == (6 * 2.0**-16 if dtype == E5M2 else 0)).all()
    x[1:] = torch.randn(5, 20)
    arguments = x, COMPUTE_SCALE(x, [-1], dtype, True), dtype, (1, 1)
    assert_same(interpreter.call(LAUNCH, *arguments), QUANTIZE_TRANSPOSED(*arguments))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_ties_and_saturation(interpreter: InterpreterProcess, dtype: torch.dtype) -> None:
    """Every FP8 number, every midpoint of two, and beyond the largest, under a scale that does not fit them."""
    finite = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = finite[finite.isfinite()].unique()
    x = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, finite * 1.25]).reshape(1, -1)
    arguments = x, torch.ones(1, 1), dtype, (1, 1)
    data, _ = assert_same(interpreter.call(LAUNCH, *arguments), QUANTIZE_TRANSPOSED(*arguments))
    assert data.float().abs().max() == finite.max()


# --- Nothing, and what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiples", [(1, 1), (16, 16)])
@pytest.mark.parametrize("source", [torch.bfloat16, E4M3])
@pytest.mark.parametrize(("rows", "columns"), [(0, 20), (5, 0), (0, 0)])
def test_nothing_has_the_scale_of_nothing(
    interpreter: InterpreterProcess, rows: int, columns: int, source: torch.dtype, multiples: tuple[int, int]
) -> None:
    """No tokens: no data, and the scale that ``compute_scale`` gives nothing."""
    x, row_scale = torch.empty(rows, columns).to(source), torch.full((rows, 1), 0.5)
    data, scale = QUANTIZE_TRANSPOSED(x, row_scale, E4M3, multiples)
    assert scale.item() == (0.5 if rows else 2.0**-126)
    assert data.numel() == 0
    assert_same(interpreter.call(LAUNCH, x, row_scale, E4M3, multiples), (data, scale))


@pytest.mark.parametrize(
    ("x", "row_scale"),
    [
        pytest.param(torch.ones(2, 5, 8), torch.ones(2, 5, 1), id="batch"),
        pytest.param(torch.ones(5, 8).mT, torch.ones(8, 1), id="columns contiguous"),
        pytest.param(torch.ones(5, 8), torch.ones(1, 1), id="one scale"),
        pytest.param(torch.ones(5, 8), torch.ones(1, 8), id="a scale per column"),
        pytest.param(torch.ones(5, 8), torch.ones(5), id="scales without a dimension"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_launch(x: torch.Tensor, row_scale: torch.Tensor) -> None:
    """Here, where Triton compiles and has no GPU, a launch would fail differently."""
    with pytest.raises(ValueError, match="a matrix with contiguous rows and a scale per row, not shape"):
        kernels.launch_quantize_transposed(x, row_scale, E4M3)


# --- In a graph -------------------------------------------------------------------------------------------------------


def test_dynamic_rows_add_no_guard() -> None:
    """One graph for any number of tokens."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.empty(300, 48), symbolic_context=dynamic)
    with mode:
        row_scale = torch.empty(x.shape[0], 1)
        graph = make_fx(lambda *t: kernels.launch_quantize_transposed(*t, E4M3, (16, 16)))(x, row_scale).graph
    (launch,) = graph.find_nodes(op="call_function", target=torch.ops.higher_order.triton_kernel_wrapper_functional)
    assert launch.kwargs["grid"] == [(kernels.PROGRAMS, 1, 1)]
    assert isinstance(launch.kwargs["kwargs"]["rows"], torch.fx.Node)
    assert launch.kwargs["kwargs"]["columns"] == 48
    assert sorted(launch.kwargs["tensors_to_clone"]) == ["data", "scale"]
    assert not shapes.guards
